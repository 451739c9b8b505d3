#!/usr/bin/env bash
# Installs what the tests need and runs them: bash launch/test.sh [arguments of pytest, such as -m slow]
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
install '.[dev]'
install_without_dependencies
.venv/bin/ruff check .
.venv/bin/lint-imports --no-logo  # which room may import which: pyproject.toml
exec .venv/bin/python -m pytest -n 2 --dist loadfile "$@"  # a file stays in one process, with what it has compiled
