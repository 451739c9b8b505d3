#!/usr/bin/env bash
# Starts the job on GKE: fills launch/gke-jobset.yaml in and applies it. Needs kubectl, the JobSet controller in the cluster, and an
# image built from launch/Dockerfile. The job, and what to rent, stand in launch/job.env.
#
#   bash launch/gke.sh [--dry-run] [arguments of `jaxsearch train`]
#
# --dry-run prints the manifest. Follow it: kubectl logs -f -l jobset.sigs.k8s.io/jobset-name=NAME; stop: kubectl delete jobset NAME.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
source launch/job.env

[ -n "$DRY_RUN" ] || [ -n "$IMAGE" ] || { echo 'gke.sh: set IMAGE in launch/job.env' >&2; exit 2; }
case $OUT in
  /data/* | *://*) ;;
  *) echo "gke.sh: OUT=$OUT would be lost with its pod: name a path below /data, or a bucket" >&2; [ -n "$DRY_RUN" ] || exit 2 ;;
esac
for name in MODEL QUESTIONS SEARCH_URL RETRIEVER ROLLOUT_URLS ROLLOUT_ARGS OUT; do  # they stand between quotes in the manifest
  value=${!name//\\/\\\\}
  printf -v "$name" %s "${value//\"/\\\"}"
done
COORDINATOR=$NAME-hosts-0-0.$NAME:8476
ARGUMENTS=$("$PYTHON" -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@")
export NAME IMAGE HOSTS RESOURCE DEVICES NODES CLAIM COMMAND CONFIG MODEL QUESTIONS SEARCH_URL RETRIEVER RETRIEVER_GPUS TRAIN_GPUS PORT OUT
export ROLLOUT ROLLOUT_URLS ROLLOUT_GPUS ROLLOUT_PYTHON ROLLOUT_ARGS ROLLOUT_PORT PROCESSES COORDINATOR ARGUMENTS
# shellcheck disable=SC2016  # names for envsubst; what else has a dollar is left to the pod
names='$NAME $IMAGE $HOSTS $RESOURCE $DEVICES $NODES $CLAIM $COMMAND $CONFIG $MODEL $QUESTIONS $SEARCH_URL $RETRIEVER
       $RETRIEVER_GPUS $TRAIN_GPUS $PORT $ROLLOUT $ROLLOUT_URLS $ROLLOUT_GPUS $ROLLOUT_PYTHON $ROLLOUT_ARGS $ROLLOUT_PORT
       $OUT $PROCESSES $COORDINATOR $ARGUMENTS'
if [ -n "$DRY_RUN" ]; then
  envsubst "$names" < launch/gke-jobset.yaml
else
  envsubst "$names" < launch/gke-jobset.yaml | kubectl apply -f -
fi
