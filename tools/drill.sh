#!/usr/bin/env bash
# Fault drills: inject a fault into a real training job on a Slurm cluster of four virtual nodes.
#   tools/drill.sh                       all drills, one job each; needs root, and some minutes per drill
#   tools/drill.sh engine link           these drills
#   tools/drill.sh --list                list the drills
#   tools/drill.sh --json result.json --keep
# Prints a table: the fault, the log lines, seconds until the next update, and whether all checks pass (exit code 0).
# docs/operations.md describes each drill and the checks after it.
# PYTHON: the Python with this package (default: .venv/bin/python)
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$PWD/.venv/bin/python}
command -v "$PYTHON" >/dev/null || { echo "drill: $PYTHON is missing: make install, or set PYTHON" >&2; exit 2; }
exec "$PYTHON" -m tools.drills "$@"
