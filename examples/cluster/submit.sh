#!/bin/bash
# A run on an existing Ray cluster:  RAY_API_SERVER_ADDRESS=http://HEAD:8265 examples/cluster/submit.sh run.yaml --run-dir /shared/runs/first [FLAGS]
# Set RAY_AUTH_MODE and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) to the cluster's values.

set -euo pipefail

if [ $# -lt 1 ]; then
    echo "usage: RAY_API_SERVER_ADDRESS=http://HEAD:8265 $0 run.yaml --run-dir /shared/runs/first [FLAGS]" >&2
    exit 2
fi
config=$1
shift
# The configuration is sent with the working directory. The host and all plugins must be installed on the cluster in the same versions.
# --run-dir must be an absolute path that remains after the job, because the job's working directory is a temporary copy.
# The controller needs one CPU and no GPU. The placement uses the other devices.
ray job submit \
    --working-dir . \
    --entrypoint-num-cpus 1 \
    --runtime-env-json '{"env_vars": {"RAY_USAGE_STATS_ENABLED": "0"}}' \
    -- rlhf train --config "$config" --runtime ray --ray.address auto "$@"
