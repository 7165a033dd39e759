#!/usr/bin/env bash
# Create or update the virtual environment $1 with every pinned package and this project.
# PYTHON: the interpreter to use. TORCH_BACKEND: uv's option that picks torch's CPU build.
set -euo pipefail
venv=${1:?usage: install.sh VENV}
python=${PYTHON:-python3}

if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
    echo "install: Python 3.11 is needed; '$python' is $("$python" --version 2>&1 || echo missing). Set PYTHON=/path/to/python3.11" >&2
    exit 1
fi
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    if [ "$(id -u)" != 0 ]; then
        echo "install: this Python has no venv; install the package python3-venv first" >&2
        exit 1
    fi
    apt-get update -q && apt-get install -y -q --no-install-recommends python3-venv
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install -q uv
# Compile bytecode once: where Python may not write it, each process would compile torch and vLLM again.
# shellcheck disable=SC2086  # the option may be empty
"$venv/bin/uv" pip install -q --compile-bytecode --python "$venv/bin/python" ${TORCH_BACKEND:-} \
    --override requirements/overrides.txt -r requirements/cpu.txt
"$venv/bin/uv" pip install -q --python "$venv/bin/python" --no-deps -e .
