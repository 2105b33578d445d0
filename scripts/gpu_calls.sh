#!/bin/bash
# One of the three calls that measure a rented GPU in minutes: bash scripts/gpu_calls.sh first|second|third [PIECES]
# PIECES: the folder of what scripts/gpu_carry made, as far as it is here; default gpu_pieces. Earlier pieces are kept in $KEEP.
# Writes $OUT/figures.json, $OUT/LINES.jsonl and $OUT/caches. COMMIT: of the checkout, where git cannot say it.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
case ${1:-} in first) limit=260 ;; second) limit=290 ;; third) limit=230 ;; *) sed -n 2,4p scripts/gpu_calls.sh >&2; exit 2 ;; esac
call=$1 pieces=${2:-gpu_pieces} keep=${KEEP:-/tmp/rlhf_gpu} python=${PYTHON:-python3}
export OUT=${OUT:-$PWD/gpu_out} PYTHONPATH=$keep/site${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$OUT" "$keep/pieces" "$keep/site"
[ -d "$pieces/caches" ] && cp -r "$pieces/caches" "$OUT/"      # what the last call compiled
for wheel in "$pieces"/*.whl; do [ -e "$wheel" ] && "$python" -m zipfile -e "$wheel" "$keep/site"; done
if compgen -G "$pieces/piece-*" >/dev/null; then
    cp "$pieces"/piece-* "$pieces/SUMS" "$keep/pieces/"
    # All of them are here: vLLM is unpacked. With the first piece alone the sums do not fit, and vLLM's parts skip.
    [ -e "$keep/joined" ] || { bash scripts/gpu_carry/join.sh "$keep/pieces" "$keep/site" && touch "$keep/joined"; }
fi
if [ -e "$keep/growth" ]; then                                 # it ran while a piece travelled
    for _ in $(seq 40); do kill -0 "$(cat "$keep/growth")" 2>/dev/null || break; sleep 1; done
    cat "$keep/growth.jsonl"; cp "$keep/growth.json" "$keep/growth.jsonl" "$OUT/"; rm "$keep/growth"
fi
"$python" scripts/gpu_accept.py --call "$call" --seconds $((limit - SECONDS)) ${COMMIT:+--commit "$COMMIT"} ${DRY:+--dry} \
    | tee "$OUT/$call.jsonl"
code=${PIPESTATUS[0]}
if [ "$call" = first ]; then
    setsid "$python" scripts/gpu_accept.py --part growth --results "$keep/growth.json" ${COMMIT:+--commit "$COMMIT"} \
        ${DRY:+--dry} </dev/null >"$keep/growth.jsonl" 2>/dev/null &
    echo $! >"$keep/growth"
fi
exit "$code"
