#!/bin/sh
# The sdist, and the wheel made of it, in dist/. Made twice: the same commit is the same bytes.
set -eu
cd "$(dirname "$0")/.."
python=.venv/bin/python
if [ -z "${SOURCE_DATE_EPOCH:-}" ]; then
    SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) || {
        echo 'dist: no commit to take the time from; set SOURCE_DATE_EPOCH' >&2
        exit 1
    }
fi
export SOURCE_DATE_EPOCH

again=$(mktemp -d)
trap 'rm -rf "$again"' EXIT
trap 'exit 130' HUP INT TERM
rm -rf dist
for where in dist "$again"; do
    # Without isolation: the lock's own build backend, and no network.
    $python -m build --no-isolation --outdir "$where" >"$again/log" 2>&1 || {
        cat "$again/log" >&2
        exit 1
    }
done
for file in dist/*; do
    cmp "$file" "$again/${file##*/}"
done
$python -m twine check --strict dist/*
sha256sum dist/*
