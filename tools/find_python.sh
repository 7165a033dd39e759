#!/usr/bin/env bash
# Print the path of a Python that runs, such as 3.12, also one of pyenv that is not selected.
#   tools/find_python.sh VERSION
set -euo pipefail
version=${1:?usage: find_python.sh VERSION}
candidates=("python$version")
if command -v pyenv >/dev/null; then candidates+=("$(pyenv root)"/versions/"$version"*/bin/python); fi
for candidate in "${candidates[@]}"; do
    if "$candidate" -c '' 2>/dev/null; then
        command -v "$candidate"
        exit
    fi
done
echo "no Python $version is installed here" >&2
exit 1
