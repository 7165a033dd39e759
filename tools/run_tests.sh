#!/usr/bin/env bash
# Run the tests that a marker expression selects: first in parallel, then the tests marked `alone` one by one.
#   tools/run_tests.sh "not soak" [arguments of pytest]
# PYTHON: the Python with this package. TEST_PROCESSES: parallel processes (default: 2, which take 12 GiB at most)
# Times of all tests are written to build/tests/*.xml (`make test-times` reads them).
set -uo pipefail
cd "$(dirname "$0")/.."
selected=${1:?usage: run_tests.sh MARKERS [ARGUMENT...]}
shift
NONE=5  # pytest's exit code for no tests
unset PYTHONDONTWRITEBYTECODE  # hundreds of processes import the project, and would compile it each
times=build/tests/$(tr -c 'a-z\n' _ <<<"$selected")

run() { "${PYTHON:-.venv/bin/python}" -m pytest "$@"; }

run -m "($selected) and not alone" -n "${TEST_PROCESSES:-2}" --dist loadfile --no-loadscope-reorder \
    --junitxml="$times.xml" "$@"
parallel=$?
if [ $parallel -gt 1 ] && [ $parallel != $NONE ]; then exit $parallel; fi  # interrupted, or a usage error
# Without a path among the arguments, only the files with such tests are collected: the others import for half a minute.
mapfile -t paths < <(grep -rl --include='test_*.py' 'mark\.alone' tests)
for argument in "$@"; do
    if [ -e "${argument%%::*}" ]; then paths=(); fi
done
run -m "($selected) and alone" --junitxml="$times.alone.xml" "$@" "${paths[@]}"
alone=$?
if [ $parallel = $NONE ]; then exit $alone; fi
if [ $alone = $NONE ] || [ $alone = 0 ]; then exit $parallel; fi
exit $alone
