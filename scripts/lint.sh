#!/bin/sh
# Formatting, lint, types and shell scripts: all of them, then fail if one did.
set -u
cd "$(dirname "$0")/.." || exit
PATH=$PWD/.venv/bin:$PATH
status=0

ruff format --check --quiet . || { echo 'lint: run make format' >&2; status=1; }
ruff check --quiet . || status=1
mypy --no-error-summary || status=1
shellcheck scripts/*.sh .ci/run benchmarks/run || status=1
# The libraries are pieces of one script: unused names and missing shebangs are how they are.
shellcheck --shell=sh --exclude=SC2034,SC2154,SC2317 nodeready/sh/*.sh || status=1

[ "$status" = 0 ] && echo 'lint: all good'
exit "$status"
