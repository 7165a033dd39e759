#!/usr/bin/env bash
# Run the tests that a marker expression picks: in several processes at once, then those alone that are marked so.
#   tools/run_tests.sh "not soak" [further arguments of pytest]
# PYTHON: the Python that has this package. TEST_PROCESSES: how many at once (default: 2, which take 12 GiB at most)
set -uo pipefail
cd "$(dirname "$0")/.."
picked=${1:?usage: run_tests.sh MARKERS [ARGUMENT...]}
shift
NONE=5  # what pytest exits with when it found no test

run() { "${PYTHON:-.venv/bin/python}" -m pytest "$@"; }

run -m "($picked) and not alone" -n "${TEST_PROCESSES:-2}" --dist loadfile "$@"
together=$?
if [ $together -gt 1 ] && [ $together != $NONE ]; then exit $together; fi  # interrupted, or wrongly called
run -m "($picked) and alone" "$@"
alone=$?
if [ $together = $NONE ]; then exit $alone; fi
if [ $alone = $NONE ] || [ $alone = 0 ]; then exit $together; fi
exit $alone
