#!/bin/sh
# The sdist, and the wheel made of it, in dist/. Made twice: the same commit is the same bytes. Beside
# them the locked dependencies as a CycloneDX bill of materials, and the sha256 of all.
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

version=$($python -c 'import nodeready; print(nodeready.__version__)')
$python -W ignore -m cyclonedx_py requirements --output-reproducible --pyproject pyproject.toml \
    requirements-install.lock |
    $python -c 'import json, sys
bill = json.load(sys.stdin)
bill["metadata"]["component"]["version"] = sys.argv[1]
json.dump(bill, sys.stdout, indent=1)' "$version" >"dist/nodeready-$version.cdx.json"
cd dist
sha256sum nodeready-* | tee SHA256SUMS
