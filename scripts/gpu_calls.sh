#!/bin/bash
# One of the three calls that measure a lent GPU in minutes: bash scripts/gpu_calls.sh first|second|third [PIECES]
# PIECES: the folder with those pieces of scripts/gpu_carry that came with this call (default: gpu_pieces); what came before is in $KEEP.
# Writes $OUT/figures.json, $OUT/CALL.jsonl and $OUT/caches. $COMMIT: of the checkout, where git cannot say it. DRY=1: tiny, on a CPU.
set -uo pipefail
if [ $# -gt 1 ]; then set -- "$1" "$(cd "$2" 2>/dev/null && pwd || echo "$2")"; fi # before this script changes the folder
cd "$(dirname "$0")/.." || exit 2
case ${1:-} in first) limit=260 ;; second) limit=290 ;; third) limit=230 ;; *) sed -n 2,4p scripts/gpu_calls.sh >&2; exit 2 ;; esac
call=$1 pieces=${2:-gpu_pieces} keep=${KEEP:-/tmp/rlhf_gpu} python=${PYTHON:-python3}
if [ $# -gt 1 ] && [ ! -d "$pieces" ]; then echo "$pieces is no folder of pieces" >&2; exit 2; fi
export OUT=${OUT:-$PWD/gpu_out} VLLM_USE_FLASHINFER_SAMPLER=0
accept=("$python" scripts/gpu_accept.py ${COMMIT:+--commit "$COMMIT"} ${DRY:+--dry})
mkdir -p "$OUT" "$keep/pieces"
for folder in "$keep" "$pieces"; do
    if [ -d "$folder/caches" ]; then cp -r "$folder/caches" "$OUT/"; fi # what an earlier call has compiled
done
if [ -e "$pieces/SUMS" ]; then
    cmp -s "$pieces/SUMS" "$keep/pieces/SUMS" || { rm -r "$keep/pieces" && mkdir "$keep/pieces"; } # of another packing
    cp "$pieces/SUMS" "$keep/pieces/"
    for piece in "$pieces"/piece-*; do if [ -e "$piece" ]; then cp "$piece" "$keep/pieces/"; fi; done
fi
if [ -e "$keep/pieces/SUMS" ]; then
    site=$keep/site-$(sha256sum <"$keep/pieces/SUMS" | cut -c 1-12)
    # Until the last piece is here, join says what is missing, and parts say what they lack.
    [ -d "$site" ] || "$python" scripts/gpu_carry/join.py "$keep/pieces" "$site" >/dev/null
    if [ -d "$site" ]; then export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}; fi
fi
if [ -e "$keep/growth" ]; then # it ran while pieces travelled
    for _ in $(seq 40); do kill -0 "$(cat "$keep/growth")" 2>/dev/null || break; sleep 1; done
    cp "$keep/growth.json" "$keep/growth.jsonl" "$OUT/"
    rm "$keep/growth"
fi
"${accept[@]}" --call "$call" --seconds $((limit - SECONDS)) | tee "$OUT/$call.jsonl"
code=${PIPESTATUS[0]}
if [ -d "$OUT/caches" ]; then cp -r "$OUT/caches" "$keep/"; fi
if [ "$call" = first ]; then
    setsid "${accept[@]}" --part growth --results "$keep/growth.json" </dev/null >"$keep/growth.jsonl" 2>/dev/null &
    echo $! >"$keep/growth"
fi
exit "$code"
