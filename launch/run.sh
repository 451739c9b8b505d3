#!/usr/bin/env bash
# Trains on one host, in one process or PROCESSES: all that a single machine needs; clusters run it on every host.
#
#   bash launch/run.sh [--dry-run] [arguments of `jaxsearch train`, such as --config.steps=100]
#
# The job stands in launch/job.env. Starts the retriever and the rollout server that it names (RETRIEVER, ROLLOUT) beside the job,
# passes SIGTERM on (the current step is finished and saved), and restarts a process that died. The same command resumes the
# run in OUT.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${JAX_COMPILATION_CACHE_DIR:-}
source launch/environment.sh
source launch/job.env
# All hosts reuse what one has compiled, after a restart too.
[ "$HOSTS" = 1 ] || export JAX_COMPILATION_CACHE_DIR=${cache:-$(dirname "$OUT")/.jax_cache}
case $JAX_COMPILATION_CACHE_DIR in  # XLA's own cache, of tuning on GPUs, is for disks
  *://*) export JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES=${JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES:-none} ;;
esac

if [ -x .venv/bin/jaxsearch ]; then
  jaxsearch=.venv/bin/jaxsearch
elif ! jaxsearch=$(command -v jaxsearch); then
  install ".[${EXTRAS:+$EXTRAS,}serve]"
  jaxsearch=.venv/bin/jaxsearch
fi

train=("$jaxsearch" "$COMMAND" --config "$CONFIG" --config.out="$OUT")
[ -z "$MODEL" ] || train+=(--config.model="$MODEL")
[ -z "$QUESTIONS" ] || train+=(--config.data.questions="$QUESTIONS")
if [ -n "$RETRIEVER" ]; then
  SEARCH_URL=http://127.0.0.1:$PORT/retrieve
fi
[ -z "$SEARCH_URL" ] || train+=(--config.search.backend=http --config.search.url="$SEARCH_URL")
if [ -n "$ROLLOUT_URLS" ] && [ -z "$ROLLOUT" ]; then
  echo 'run.sh: ROLLOUT_URLS needs ROLLOUT, vllm or sglang' >&2
  exit 2
fi
if [ -n "$ROLLOUT" ]; then
  train+=(--config.sampler.engine="$ROLLOUT" --config.sampler.urls="${ROLLOUT_URLS:-http://127.0.0.1:$ROLLOUT_PORT}")
fi
several=--config.distributed.enabled=True
[ "$HOSTS:$COORDINATOR" != 1: ] || COORDINATOR=127.0.0.1:8476
case $HOSTS:$PROCESSES in
  1:1) train+=(--config.distributed.enabled=False) ;;
  auto:1) train+=("$several") ;;
  auto:*) echo 'run.sh: PROCESSES needs a number of HOSTS' >&2; exit 2 ;;
  *) train+=("$several" --config.distributed.coordinator="$COORDINATOR"
             --config.distributed.num_processes=$((HOSTS * PROCESSES))) ;;
esac
if [ "$PROCESSES" != 1 ]; then  # each is told which GPUs are its own; it sees all, as NCCL likes
  gpus=${TRAIN_GPUS:-${JAX_LOCAL_DEVICE_IDS:-$({ compgen -G '/dev/nvidia[0-9]*' || true; } | awk '{print NR - 1}' | paste -sd,)}}
  IFS=, read -ra gpus <<< "$gpus"
  share=$((${#gpus[@]} / PROCESSES))
  if [ "$share" = 0 ] || [ $((share * PROCESSES)) != ${#gpus[@]} ]; then
    echo "run.sh: PROCESSES=$PROCESSES do not divide ${#gpus[@]} GPUs (TRAIN_GPUS names them)" >&2
    exit 2
  fi
elif [ -n "$TRAIN_GPUS" ]; then  # on hosts of SLURM JAX takes them from JAX_LOCAL_DEVICE_IDS
  name=CUDA_VISIBLE_DEVICES
  [ "$HOSTS" = 1 ] || [ -z "${JAX_LOCAL_DEVICE_IDS:-}" ] || name=JAX_LOCAL_DEVICE_IDS
  export "$name=$TRAIN_GPUS"
fi
if [ -n "$RETRIEVER_GPUS$ROLLOUT_GPUS" ] && [ -z "$TRAIN_GPUS" ]; then
  echo 'run.sh: RETRIEVER_GPUS and ROLLOUT_GPUS need TRAIN_GPUS, those that are left for training' >&2
  exit 2
fi
of_process() {  # of_process NUMBER ARGUMENTS…: the command of one of this host's processes, as `process`
  local number=$1
  shift
  process=("${train[@]}")
  if [ "$PROCESSES" != 1 ]; then
    process=(env JAX_LOCAL_DEVICE_IDS="$(IFS=,; echo "${gpus[*]:number * share:share}")" "${train[@]}"
             --config.distributed.process_id=$((${PROCESS_ID:-0} * PROCESSES + number)))
  elif [ "$HOSTS" != 1 ] && [ "$HOSTS" != auto ]; then
    process+=(--config.distributed.process_id="$PROCESS_ID")
  fi
  process+=("$@")
}

running=()
# shellcheck disable=SC2329  # the trap calls it
stop() {  # a signal that arrives while nothing runs ends the script
  stopped=1
  if [ ${#running[@]} -gt 0 ]; then kill -TERM "${running[@]}" 2> /dev/null || true; fi
}
finish() {  # waits for a process through any number of signals; its status
  local status=0
  wait "$1" || status=$?
  while kill -0 "$1" 2> /dev/null; do
    status=0
    wait "$1" || status=$?
  done
  return "$status"
}
stopped=
trap stop TERM INT

declare -A beside=()  # name -> process of a server, which leads a group
trap 'kill -TERM -- "${beside[@]/#/-}" 2> /dev/null || true' EXIT
start() {  # start NAME PORT COMMAND …: a server beside the job that does not run yet; returns once it answers
  local name=$1 port=$2
  shift 2
  if [ -n "$DRY_RUN" ]; then
    step "$@"
    return
  fi
  if [ -n "${beside[$name]:-}" ]; then
    if kill -0 "${beside[$name]}" 2> /dev/null; then return; fi
    kill -KILL -- "-${beside[$name]}" 2> /dev/null || true  # what it left would hold GPUs and the port
  fi
  if (exec 3<> "/dev/tcp/127.0.0.1/$port") 2> /dev/null; then
    echo "run.sh: $name: port $port is in use by another server; set PORT or ROLLOUT_PORT" >&2
    exit 2
  fi
  setsid "$@" &  # a signal to the job is not for it: the step in hand may need it
  local server=$! last=$((SECONDS + 3600))
  beside[$name]=$server
  until no_proxy=127.0.0.1 "$PYTHON" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' \
      "http://127.0.0.1:$port/health" 2> /dev/null; do
    if [ -n "$stopped" ]; then exit 143; fi
    kill -0 "$server" 2> /dev/null || { echo "run.sh: $name ended before it answered: $*" >&2; exit 2; }
    [ "$SECONDS" -lt "$last" ] || { echo "run.sh: $name did not answer within an hour: $*" >&2; exit 2; }
    sleep 1
  done
}

serve() {
  if [ -n "$RETRIEVER" ]; then
    on=(JAX_PLATFORMS=cpu)  # on devices it would take their memory from training, and lock a TPU
    [ -z "$RETRIEVER_GPUS" ] || on=(JAX_PLATFORMS=cuda CUDA_VISIBLE_DEVICES="$RETRIEVER_GPUS")
    # shellcheck disable=SC2086  # several words
    start 'the retriever' "$PORT" env "${on[@]}" "$jaxsearch" serve $RETRIEVER --port "$PORT"
  fi
  if [ -n "$ROLLOUT" ] && [ -z "$ROLLOUT_URLS" ]; then
    [ "$HOSTS" != auto ] || { echo 'run.sh: on hosts of TPUs: ROLLOUT needs ROLLOUT_URLS, of servers elsewhere' >&2; exit 2; }
    [ -n "$MODEL" ] || { echo 'run.sh: ROLLOUT needs MODEL, a Hugging Face folder' >&2; exit 2; }
    on=()
    [ -z "$ROLLOUT_GPUS" ] || on=(CUDA_VISIBLE_DEVICES="$ROLLOUT_GPUS")
    case $ROLLOUT in
      vllm) server=(-m vllm.entrypoints.cli.main serve "$MODEL" --enable-scale-out --enable-prompt-tokens-details)
            on+=(VLLM_SERVER_DEV_MODE=1) ;;  # to take weights: for this host alone
      sglang) server=(-m sglang.launch_server --model-path "$MODEL") ;;
      *) echo "run.sh: ROLLOUT=$ROLLOUT is neither vllm nor sglang" >&2; exit 2 ;;
    esac
    # shellcheck disable=SC2086
    start "$ROLLOUT" "$ROLLOUT_PORT" env "${on[@]}" "$ROLLOUT_PYTHON" "${server[@]}" --host 127.0.0.1 --port "$ROLLOUT_PORT" \
      $ROLLOUT_ARGS
  fi
}

# shellcheck disable=SC2329  # called in the background
watch() {  # ends the attempt, after its step, once a server beside it is gone: of several hosts' searches too few would fail
  while sleep 10 > /dev/null 2>&1; do
    for server in "${beside[@]}"; do
      kill -0 "$server" 2> /dev/null || { kill -TERM "${running[@]}" 2> /dev/null || true; return; }
    done
  done
}

reach() {  # waits for half an hour at most until a search server elsewhere replies: it may still load its index
  local last=$((SECONDS + 1800)) said=
  until no_proxy=127.0.0.1,localhost,${no_proxy:-${NO_PROXY:-}} "$PYTHON" -c '
import sys, urllib.error, urllib.request
for url in sys.argv[1].split(","):
  try:
    urllib.request.urlopen(url, timeout=5)
  except urllib.error.HTTPError as error:
    if error.code in (502, 503, 504):  # of what stands before it
      continue
  except OSError:
    continue
  except Exception:  # a mistake in the address: training names it
    pass
  sys.exit()
sys.exit(1)' "$SEARCH_URL" 2> /dev/null; do
    [ -n "$said" ] || echo "run.sh: waiting for $SEARCH_URL" >&2
    said=1
    if [ -n "$stopped" ]; then exit 143; fi
    if [ "$SECONDS" -gt "$last" ]; then return; fi
    sleep 5
  done
}

numbers=$(seq 0 $((PROCESSES - 1)))
if [ -n "$DRY_RUN" ]; then
  serve
  for number in $numbers; do
    of_process "$number" "$@"
    step "${process[@]}"
  done
  exit 0
fi
if [ -n "$SEARCH_URL" ] && [ -z "$RETRIEVER" ]; then
  case "$SEARCH_URL $*" in
    *'{'* | *search.replay=True*) ;;  # one for each source; recorded searches
    *) reach ;;
  esac
fi
attempt=0
while true; do
  began=$SECONDS status=0
  serve  # one that died is started again
  for number in $numbers; do
    of_process "$number" "$@"
    "${process[@]}" &
    running+=($!)
  done
  [ -z "$stopped" ] || stop  # it came before they ran
  watcher=
  if [ ${#beside[@]} -gt 0 ]; then watch & watcher=$!; fi
  for one in "${running[@]}"; do
    finish "$one" || {
      own=$?
      case $status in
        1 | 2) ;;  # kept: the others abort because of this one
        *) if [ "$own" -le 2 ] || [ "$own" -gt "$status" ]; then status=$own; fi ;;
      esac
    }
  done
  running=()
  [ -z "$watcher" ] || kill "$watcher" 2> /dev/null || true
  for server in "${beside[@]}"; do  # a job of one host starts again where a dead server made its searches fail
    [ "$HOSTS:$status" != 1:1 ] || kill -0 "$server" 2> /dev/null || status=75
  done
  case $status in
    0 | 1 | 2) exit "$status" ;;  # done; stopped by a limit of the config; a mistake that would come again
  esac
  if [ -n "$stopped" ]; then exit "$status"; fi
  [ $((SECONDS - began)) -lt 1800 ] || attempt=0
  echo "run.sh: training ended with status $status, $((RESTARTS - attempt)) restarts left" >&2
  if [ "$attempt" -ge "$RESTARTS" ]; then exit "$status"; fi
  attempt=$((attempt + 1))
  sleep 5
  if [ -n "$stopped" ]; then exit "$status"; fi  # a signal that came meanwhile
done
