#!/bin/sh
# Install the tool in the ways of docs/install.md as a stranger does, in a Debian without a compiler.
# Each installation audits the machine as an ordinary user.
# Usage: scripts/fresh.sh SUITE scripts/fresh_install.sh [deb]
# Without `deb`: pip, pipx and uv, as that user. With it: the Debian package, which is built first.
set -eu
cd "$(dirname "$0")/.."

if [ "$(hostname)" != fresh ]; then
    echo "fresh_install: it adds a package and a user: give it to scripts/fresh.sh" >&2
    exit 2
fi

# The program $1 answers, and its audit of this machine has results.
works() {
    cd /
    "$1" --version
    "$1" --help >/dev/null
    # A machine that nobody prepared differs from the policy: 3.
    status=0
    "$1" audit @local --format json >"$HOME/audit.json" || status=$?
    [ "$status" = 0 ] || [ "$status" = 3 ]
    python3 -c 'import json, sys
(node,) = json.load(open(sys.argv[1]))["nodes"]
sys.exit(node["status"] not in ("ok", "warn", "fail"))' "$HOME/audit.json"
}

# As the stranger.
each_way() {
    python3 -m venv "$HOME/venv"
    set -- "$HOME/venv/bin/pip" install --quiet --disable-pip-version-check
    "$@" --require-hashes --only-binary :all: -r requirements-install.lock
    "$@" --no-deps --no-build-isolation .
    "$HOME/venv/bin/pip" check
    (works "$HOME/venv/bin/nodeready")

    rm -rf dist
    "$HOME/venv/bin/hatchling" build -t wheel
    wheel=$(echo dist/nodeready-*.whl)
    export PATH="$HOME/.local/bin:$PATH"
    pipx install "./$wheel"
    (works "$HOME/.local/bin/nodeready")
    pipx uninstall nodeready

    # From an index: the directory with the wheel is one.
    "$@" uv
    "$HOME/venv/bin/uv" tool install --quiet --find-links dist nodeready
    (works "$HOME/.local/bin/nodeready")
}

# As root, but for the audit.
package() {
    scripts/deb.sh
    # What builds it is not needed to run it.
    apt-get purge -y -qq --autoremove python3-venv >/dev/null
    apt-get install -y -qq --no-install-recommends ./dist/nodeready_*.deb >/dev/null
    runuser -u stranger -- sh scripts/fresh_install.sh works /usr/bin/nodeready
    gzip -t /usr/share/man/man1/nodeready.1.gz
    [ -e /usr/share/nodeready/prometheus/nodeready.rules.yml ]
    apt-get remove -y -qq nodeready >/dev/null
    [ ! -e /opt/nodeready ]
}

case ${1:-} in
works)
    works "$2"
    exit
    ;;
each_way)
    each_way
    exit
    ;;
esac

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
export HOME=/home/stranger
if [ "${1:-}" = deb ]; then
    package
    exit
fi
if [ -n "${PIP_CACHE_DIR:-}" ]; then
    export PIP_CACHE_DIR="$PIP_CACHE_DIR/stranger"
    mkdir -p "$PIP_CACHE_DIR"
    chown -R stranger: "$PIP_CACHE_DIR"
fi
cp -R . /home/stranger/nodeready
chown -R stranger: /home/stranger/nodeready
cd "$HOME/nodeready"
runuser -u stranger -- sh scripts/fresh_install.sh each_way
