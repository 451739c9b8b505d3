#!/usr/bin/env bash
# Copies this repository to all hosts of a Cloud TPU VM and starts the job there; it goes on when the connection ends.
#
#   bash launch/tpu-vm.sh [--dry-run] [arguments of `jaxsearch train`]
#
# The job, NAME (of the TPU VM) and ZONE stand in launch/job.env. Weights, data and OUT are paths that all hosts see (a mounted
# Filestore or bucket). Follow and stop it with what the script prints at its end; the same command resumes.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
source launch/job.env

if [ -z "$DRY_RUN" ] && [ -n "$(git status --porcelain -- . ':!launch/job.env')" ]; then
  echo 'tpu-vm.sh: the hosts get what is committed; commit or remove what git status shows' >&2
  exit 2
fi
on_hosts() { step gcloud compute tpus tpu-vm ssh "$NAME" --zone "$ZONE" --worker=all --command "$1"; }
# shellcheck disable=SC2016  # the hosts expand it
on_hosts '! kill -0 "$(cat jaxsearch.pid 2> /dev/null)" 2> /dev/null || { echo "a job runs here: stop it first" >&2; exit 2; }'
code=$(mktemp -d)/jaxsearch.tar.gz
trap 'rm -rf "$(dirname "$code")"' EXIT
step git archive --format=tar.gz --output "$code" HEAD
keys=$(dirname "$code")/jaxsearch.keys  # in a file: command lines can be read by others
(umask 077; for name in $KEYS; do [ -z "${!name:-}" ] || printf 'export %s=%q\n' "$name" "${!name}"; done > "$keys")
step gcloud compute tpus tpu-vm scp "$code" "$keys" "$NAME:~/" --zone "$ZONE" --worker=all
job=$(printf '%q ' env PYTHON="$PYTHON" EXTRAS="${EXTRAS:-tpu}" COMMAND="$COMMAND" CONFIG="$CONFIG" MODEL="$MODEL" QUESTIONS="$QUESTIONS" \
  SEARCH_URL="$SEARCH_URL" RETRIEVER="$RETRIEVER" PORT="$PORT" ROLLOUT="$ROLLOUT" ROLLOUT_URLS="$ROLLOUT_URLS" OUT="$OUT" HOSTS=auto RESTARTS="$RESTARTS" bash launch/run.sh "$@")
on_hosts "mkdir -p jaxsearch && tar xzf jaxsearch.tar.gz -C jaxsearch && cd jaxsearch && \
. ../jaxsearch.keys && rm ../jaxsearch.keys && \
(setsid nohup $job > ../jaxsearch.log 2>&1 & echo \$! > ../jaxsearch.pid)"
cat << END
follow: gcloud compute tpus tpu-vm ssh $NAME --zone $ZONE --worker=0 --command 'tail -f jaxsearch.log'
stop:   gcloud compute tpus tpu-vm ssh $NAME --zone $ZONE --worker=all --command 'kill -TERM \$(cat jaxsearch.pid)'
END
