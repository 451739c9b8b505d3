#!/usr/bin/env bash
# Starts the job on a GKE cluster that xpk made (https://github.com/AI-Hypercomputer/xpk), on one slice of TPUs or several.
#
#   bash launch/xpk.sh [--dry-run] [arguments of `jaxsearch train`]
#
# The job, CLUSTER, TPU_TYPE, SLICES and IMAGE stand in launch/job.env.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
source launch/job.env

[ -n "$DRY_RUN" ] || { [ -n "$CLUSTER" ] && [ -n "$IMAGE" ]; } || { echo 'xpk.sh: set CLUSTER and IMAGE in launch/job.env' >&2; exit 2; }
command="cd /jaxsearch && $(printf '%q ' env COMMAND="$COMMAND" CONFIG="$CONFIG" MODEL="$MODEL" QUESTIONS="$QUESTIONS" \
  SEARCH_URL="$SEARCH_URL" RETRIEVER="$RETRIEVER" PORT="$PORT" ROLLOUT="$ROLLOUT" ROLLOUT_URLS="$ROLLOUT_URLS" OUT="$OUT" HOSTS=auto RESTARTS=0 bash launch/run.sh "$@")"
keys=$(mktemp)  # names alone: xpk takes the values from its environment
trap 'rm -f "$keys"' EXIT
for name in $KEYS; do [ -z "${!name:-}" ] || echo "$name"; done > "$keys"
with_keys=()
[ ! -s "$keys" ] || with_keys=(--env-file "$keys")
# xpk restarts after 42 and 127 to 255; 3, 70 and 75 are faults that may pass, 1 and 2 would come again.
step xpk workload create --cluster "$CLUSTER" --workload "$NAME" --tpu-type "$TPU_TYPE" --num-slices "$SLICES" \
  --docker-image "$IMAGE" --max-restarts 1000 --restart-on-exit-codes 3,70,75 ${with_keys[@]+"${with_keys[@]}"} --command "$command"
