#!/bin/sh
# The whole tool in a minute: three real SSH nodes, their state, a deploy, a second one that has
# nothing to do, their state again, and the proof that they are ready for a job. Leaves nothing
# behind, also when interrupted.
set -eu
cd "$(dirname "$0")/.."
scripts/setup.sh demo
PATH=$PWD/.venv/bin:$PATH
NODEREADY_LAB=demo
export NODEREADY_LAB

say() {
    printf '\n\033[1m$ %s\033[0m\n' "$*"
}
[ -t 1 ] || say() { printf '\n$ %s\n' "$*"; }

# Run a command as the reader would type it; its exit status must be the expected one.
expect() {
    wanted=$1
    shift
    say "$*"
    status=0
    "$@" || status=$?
    if [ "$status" != "$wanted" ]; then
        echo "demo: expected exit status $wanted, got $status" >&2
        exit 1
    fi
}

finish() {
    trap - EXIT INT TERM
    nodeready lab down >/dev/null 2>&1 || :
}
trap finish EXIT
trap 'finish; exit 130' INT TERM

if [ "$(id -u)" != 0 ]; then
    echo "demo: the lab makes network namespaces: run as root" >&2
    exit 1
fi
expect 0 nodeready lab up --nodes 3
expect 3 nodeready audit inventories/lab.py
expect 0 nodeready deploy inventories/lab.py --yes
expect 0 nodeready deploy inventories/lab.py --yes
expect 0 nodeready audit inventories/lab.py
expect 0 nodeready ready inventories/lab.py --user root
expect 0 nodeready lab down
