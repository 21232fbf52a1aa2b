#!/bin/sh
# Formatting, lint, types, shell scripts and generated pages: all of them, then fail if one did.
# Usage: scripts/lint.sh [format|code|types|shell|pages]...
set -u
cd "$(dirname "$0")/.." || exit
PATH=$PWD/.venv/bin:$PATH
status=0

[ $# -gt 0 ] || set -- format code types shell pages
for part in "$@"; do
    case $part in
    format)
        ruff format --check --quiet . || { echo 'lint: run make format' >&2; status=1; }
        ;;
    code)
        ruff check --quiet . || status=1
        ;;
    types)
        mypy --no-error-summary || status=1
        ;;
    shell)
        shellcheck scripts/*.sh .ci/run .ci/nightly benchmarks/run || status=1
        # The libraries are pieces of one script: unused names and missing shebangs are how they are.
        shellcheck --shell=sh --exclude=SC2034,SC2154,SC2317 nodeready/sh/*.sh || status=1
        ;;
    pages)
        python scripts/make_docs.py --check || status=1
        ;;
    *)
        echo "lint: no part $part; there are format, code, types, shell and pages" >&2
        exit 2
        ;;
    esac
done

[ "$status" = 0 ] && echo 'lint: all good'
exit "$status"
