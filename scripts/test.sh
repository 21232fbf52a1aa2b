#!/bin/sh
# All tests, three at a time: most of them wait for nodes. Arguments go to pytest.
set -eu
cd "$(dirname "$0")/.."
exec .venv/bin/python -m pytest -n "${NODEREADY_TEST_JOBS:-3}" --dist loadgroup "$@"
