#!/usr/bin/env bash
# Fault drills: break something under a real training job on a Slurm of four virtual nodes, and see what comes of it.
#   tools/drill.sh                       all drills, one job each; needs root, and some minutes for each
#   tools/drill.sh engine link           these
#   tools/drill.sh --list                what there is
#   tools/drill.sh --json result.json --keep
# Prints a table: the fault, what happened, seconds until training had made its next update, and whether all is well
# (exit code 0). docs/operations.md says what each drill does, and what is looked at afterwards.
# PYTHON: the Python that has this package (default: .venv/bin/python)
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$PWD/.venv/bin/python}
command -v "$PYTHON" >/dev/null || { echo "drill: $PYTHON is missing: make install, or set PYTHON" >&2; exit 2; }
exec "$PYTHON" -m tools.drills "$@"
