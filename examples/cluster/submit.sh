#!/bin/bash
# A run on a Ray cluster that is there:  RAY_API_SERVER_ADDRESS=http://HEAD:8265 examples/cluster/submit.sh run.yaml [FLAGS]
# RAY_AUTH_MODE and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) as the cluster has them.

set -euo pipefail

config=$1
shift
# The configuration travels with the working directory; the host and all plugins are installed on the cluster, in the same versions.
# Give --run-dir as an absolute path that outlives the job: its working directory is a temporary copy.
# The controller needs no GPU: it is a job of one CPU, and the placement takes the rest.
ray job submit \
    --working-dir . \
    --entrypoint-num-cpus 1 \
    --runtime-env-json '{"env_vars": {"RAY_USAGE_STATS_ENABLED": "0"}}' \
    -- rlhf train --config "$config" --runtime ray --ray.address auto "$@"
