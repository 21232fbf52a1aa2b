#!/bin/sh
# Install the tool as a stranger does: an ordinary user with Python and without a compiler.
# Usage: scripts/fresh.sh SUITE scripts/fresh_install.sh
# Prerequisite, as the README says: python3-venv, which this installs.
set -eu
cd "$(dirname "$0")/.."

if [ "$(hostname)" != fresh ]; then
    echo "fresh_install: it adds a package and a user: give it to scripts/fresh.sh" >&2
    exit 2
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
for compiler in cc gcc clang c99 rustc; do
    if command -v "$compiler" >/dev/null; then
        echo "fresh_install: $compiler is installed: nothing would be proved" >&2
        exit 1
    fi
done
useradd --create-home stranger
if [ -n "${PIP_CACHE_DIR:-}" ]; then
    export PIP_CACHE_DIR="$PIP_CACHE_DIR/stranger"
    mkdir -p "$PIP_CACHE_DIR"
    chown -R stranger: "$PIP_CACHE_DIR"
fi
cp -R . /home/stranger/nodeready
chown -R stranger: /home/stranger/nodeready
export HOME=/home/stranger
cd "$HOME/nodeready"
# shellcheck disable=SC2016 # the stranger's own shell
runuser -u stranger -- sh -euc '
    python3 -m venv "$HOME/venv"
    set -- "$HOME/venv/bin/pip" install --quiet --disable-pip-version-check
    "$@" --require-hashes --only-binary :all: -r requirements-install.lock
    "$@" --no-deps --no-build-isolation .
    "$HOME/venv/bin/pip" check
    cd /
    "$HOME/venv/bin/nodeready" --version
    "$HOME/venv/bin/nodeready" --help >/dev/null
'
