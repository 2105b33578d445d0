#!/bin/bash
# Makes one Ray cluster of several machines and runs a command on the first. Start it on every machine, with RANK 0 on the first:
#   RAY_AUTH_TOKEN=... examples/cluster/node.sh RANK MACHINES ADDRESS:PORT COMMAND ...
# ADDRESS is the first machine's. The token is the same everywhere, and so is the environment of this script: Ray's processes inherit it.
# RAY_START has more flags for `ray start`.

set -euo pipefail

if [ $# -lt 3 ]; then
    echo "usage: RAY_AUTH_TOKEN=... $0 RANK MACHINES ADDRESS:PORT COMMAND ..." >&2
    exit 2
fi
: "${RAY_AUTH_TOKEN:?must be set to the same long random text on all machines}"
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0

rank=$1 machines=$2 address=$3
shift 3
read -ra flags <<< "${RAY_START:-}"

# Returns when the first machine's Ray listens; fails after five minutes.
listens() {
    for _ in {1..150}; do
        if (: > "/dev/tcp/${address%:*}/${address##*:}") 2> /dev/null; then return 0; fi
        sleep 2
    done
    echo "nothing listens at $address" >&2
    return 1
}

if [ "$rank" -ne 0 ]; then
    listens
    exec ray start --address "$address" --block "${flags[@]}"
fi

# The dashboard is off; if RAY_START switches it on, it listens on the loopback address.
ray start --head --node-ip-address "${address%:*}" --port "${address##*:}" --include-dashboard false --dashboard-host 127.0.0.1 \
    --block "${flags[@]}" &
ray=$!
# With --block, Ray's processes end with this one, and the other machines leave.
trap 'kill "$ray" 2> /dev/null || true; wait "$ray" || true' EXIT
listens
python "$(dirname "${BASH_SOURCE[0]}")/wait_for_nodes.py" "$address" "$machines"

"$@" &
command=$!
trap 'kill -TERM "$command" 2> /dev/null || true' INT TERM USR1
# A signal ends the first wait; the command then writes its checkpoint.
wait "$command" || wait "$command"
