#!/usr/bin/env bash
# Rewrite requirements/{cpu,gpu}-py{311,312}.txt from setup.py. A pin that still fits stays; arguments go to
# `uv pip compile`: --upgrade takes the newest versions.
#   tools/lock_requirements.sh [--check | OPTION...]
# With --check it changes nothing and fails if the files do not satisfy setup.py, or name what it does not need.
# PYTHON: the Python with uv in its environment.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=$(dirname "${PYTHON:-.venv/bin/python}")/uv
check=""
if [ "${1:-}" = --check ]; then check=1 && shift; fi
unset UV_FIND_LINKS # only from the index: a folder of wheels differs between machines
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

resolve() { # PLATFORM PYTHON OUTPUT [OPTION...]: torch's CUDA build and all that it needs
    "$uv" pip compile -q --python-version "$2" --python-platform x86_64-manylinux_2_31 \
        --no-header --no-annotate --no-emit-index-url --no-emit-find-links "${@:4}" \
        setup.py --extra trainer --extra rollout --extra monitor --extra datasets --extra "$1" -o "$3" >/dev/null
}

lock() { # PLATFORM PYTHON [OPTION...]
    local file=requirements/$1-py${2/./}.txt new=$work/$1-py${2/./}.txt
    if [ -n "$check" ]; then
        resolve "$1" "$2" "$new" -c "$file" "${@:3}"
    else
        [ ! -e "$file" ] || cp "$file" "$new" # uv keeps the pins of the file that it writes
        resolve "$1" "$2" "$new" "${@:3}"
    fi
    # torch's CPU build needs no CUDA, and the CUDA build itself names the versions of its libraries.
    [ "$1" = gpu ] || sed -i -E '/^(nvidia|cuda)-/d' "$new"
    if [ -z "$check" ]; then
        cp "$new" "$file"
    elif ! diff -u "$file" "$new" >&2; then
        echo "lock: $file does not fit setup.py; run: make locks" >&2
        return 1
    fi
    echo "$file"
}

for version in 3.11 3.12; do
    lock cpu $version --extra dev --override requirements/overrides.txt "$@"
    lock gpu $version "$@"
done
