#!/usr/bin/env bash
# Trains a search agent on the embedded world and shows that it learned. 4 to 10 minutes on two cores after set-up.
# Needs Python 3.11 or newer (for an older one, uv fetches 3.12) and pip. Arguments are passed on: bash launch/quickstart.sh
# --config.seed=1; --dry-run prints what it would do.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
install '.'
step exec .venv/bin/jaxsearch train --config configs/quickstart.py "$@"
