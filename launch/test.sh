#!/usr/bin/env bash
# Installs what the tests need and runs them: bash launch/test.sh [--dry-run] [arguments of pytest, such as -m slow]
set -euo pipefail
cd "$(dirname "$0")/.."
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}  # sharded paths run on simulated devices
source launch/environment.sh
install '.[dev]'
install_without_dependencies
step .venv/bin/ruff check .
step .venv/bin/lint-imports --no-logo  # which package may import which: pyproject.toml
step exec .venv/bin/python -m pytest -n 2 --dist loadfile "$@"  # a file stays in one process, with what it has compiled
