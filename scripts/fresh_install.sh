#!/bin/sh
# Install the tool in each way of docs/install.md that needs no root, as a stranger does: an ordinary
# user with Python and without a compiler. Each installation then audits this machine.
# Usage: scripts/fresh.sh SUITE scripts/fresh_install.sh
# Prerequisite, as the page says: pipx, and with it python3-venv, which this installs.
set -eu
cd "$(dirname "$0")/.."

if [ "$(hostname)" != fresh ]; then
    echo "fresh_install: it adds a package and a user: give it to scripts/fresh.sh" >&2
    exit 2
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends pipx python3-venv >/dev/null
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
    works() {
        (
            cd /
            "$1" --version
            "$1" --help >/dev/null
            # A machine that nobody prepared differs from the policy: 3.
            status=0
            "$1" audit @local --format json >"$HOME/audit.json" || status=$?
            [ "$status" = 0 ] || [ "$status" = 3 ]
            python3 -c "import json, sys; nodes = json.load(open(sys.argv[1]))[\"nodes\"]
sys.exit(nodes[0][\"status\"] not in (\"ok\", \"warn\", \"fail\"))" "$HOME/audit.json"
        )
    }
    python3 -m venv "$HOME/venv"
    set -- "$HOME/venv/bin/pip" install --quiet --disable-pip-version-check
    "$@" --require-hashes --only-binary :all: -r requirements-install.lock
    "$@" --no-deps --no-build-isolation .
    "$HOME/venv/bin/pip" check
    works "$HOME/venv/bin/nodeready"

    rm -rf dist
    "$HOME/venv/bin/hatchling" build -t wheel
    wheel=$(echo dist/nodeready-*.whl)
    export PATH="$HOME/.local/bin:$PATH"
    pipx install "./$wheel"
    works "$HOME/.local/bin/nodeready"
    pipx uninstall nodeready

    # From an index: the directory with the wheel is one.
    "$@" uv
    "$HOME/venv/bin/uv" tool install --quiet --find-links dist nodeready
    works "$HOME/.local/bin/nodeready"
'
