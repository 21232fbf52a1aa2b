#!/bin/sh
# The tests of a tier, three at a time: most of them wait for nodes.
# Usage: scripts/test.sh test|lab|nightly|all [PYTEST ARGUMENTS...]
set -eu
cd "$(dirname "$0")/.."

tier=$1
shift
[ "$tier" = all ] || set -- --tier "$tier" "$@"
exec .venv/bin/python -m pytest --dist loadgroup --durations=10 -n "${NODEREADY_TEST_JOBS:-3}" "$@"
