#!/bin/sh
# Prepare a checkout: the locked Python packages in .venv and, for what needs them, system packages
# (when root, else they are named).
# Usage: scripts/setup.sh python|demo|test|lab|all|docs|dist
set -eu
cd "$(dirname "$0")/.."

what=${1:-demo}
commands=
case $what in
demo | test | lab | all)
    commands="sshd:openssh-server ssh:openssh-client ip:iproute2 unshare:util-linux sysctl:procps
        sudo:sudo gdb:gdb strace:strace pdsh:pdsh"
    ;;
python | docs | dist) ;;
*)
    echo "setup: no part $what; there are python, demo, test, lab, all, docs and dist" >&2
    exit 2
    ;;
esac
case $what in
lab | all)
    commands="$commands qemu-system-x86_64:qemu-system-x86 mmdebstrap:mmdebstrap mke2fs:e2fsprogs
        cpio:cpio busybox:busybox-static nft:nftables iptables:iptables
        fish:fish tcsh:tcsh zsh:zsh ksh:ksh man:man-db jq:jq curl:curl
        slurmctld:slurmctld slurmd:slurmd sinfo:slurm-client munged:munge"
    ;;
esac
if [ "$what" = all ]; then
    commands="$commands chromium:chromium chromedriver:chromium-driver mpirun:openmpi-bin
        prometheus:prometheus"
fi

missing=
for pair in $commands; do
    PATH=$PATH:/usr/sbin:/sbin command -v "${pair%%:*}" >/dev/null 2>&1 || missing="$missing ${pair#*:}"
done
# No program of its own: for jobs that really hang.
case $what in
lab | all)
    packages="torch:python3-torch"
    # What jobs of the nightly tests talk by.
    [ "$what" = lab ] || packages="$packages zmq:python3-zmq grpc:python3-grpcio"
    for pair in $packages; do
        [ -e "/usr/lib/python3/dist-packages/${pair%%:*}/__init__.py" ] || missing="$missing ${pair#*:}"
    done
    ;;
esac
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    if [ -n "${PYTHON:-}" ]; then
        echo "setup: $python is not Python 3.10 or newer; set PYTHON to one that is" >&2
        exit 1
    fi
    missing="$missing python3"
fi
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing="$missing python3-venv"

if [ -n "$missing" ] && [ "$(id -u)" != 0 ]; then
    case $what:$missing in
    *python3*) ;;
    # The unit tests need none of them.
    test:*)
        echo "setup: not root: tests on nodes of the lab will be skipped (they need$missing)" >&2
        missing=
        ;;
    esac
fi
if [ -n "$missing" ]; then
    if [ "$(id -u)" != 0 ]; then
        echo "setup: not root; please install:$missing" >&2
        exit 1
    fi
    if ! command -v apt-get >/dev/null 2>&1; then
        echo "setup: this is no Debian or Ubuntu; please install:$missing" >&2
        exit 1
    fi
    echo "setup: installing$missing" >&2
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    # What the packages bring along as services shall not run here (invoke-rc.d(8)).
    no_services=/usr/sbin/policy-rc.d
    if [ ! -e "$no_services" ]; then
        trap 'rm -f "$no_services"' EXIT
        trap 'exit 130' HUP INT TERM
        printf '#!/bin/sh\nexit 101\n' >"$no_services"
        chmod 755 "$no_services"
    fi
    # shellcheck disable=SC2086 # a list of words
    said=$(apt-get install -y -qq --no-install-recommends $missing 2>&1) || {
        printf '%s\n' "$said" >&2
        exit 1
    }
fi

# The image of the virtual machine is built from this machine's package lists.
case $what in
lab | all)
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 &&
        [ -z "$(apt-get indextargets 'Created-By: Packages')" ]; then
        apt-get update -qq
    fi
    ;;
esac

# One environment for everything, remade when a lock or pyproject.toml changes. The site and the
# published files need packages that nothing else does: a lock of their own. pip takes no file but
# those whose sha256 is in the lock, and runs nothing of theirs: the build backend of this checkout
# is among them.
install() {
    lock=$1 stamp=.venv/$2
    cmp -s "$lock" "$stamp" 2>/dev/null && return
    echo "setup: installing the Python packages of $lock into .venv" >&2
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    set -- .venv/bin/python -m pip install --quiet --disable-pip-version-check
    "$@" --require-hashes --only-binary :all: -r "$lock"
    cp "$lock" "$stamp"
}
install requirements.lock .nodeready-lock
# The checkout itself, with its entry points: pyinfra finds the connectors by them.
if ! cmp -s pyproject.toml .venv/.nodeready-project; then
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --no-deps --no-build-isolation -e .
    cp pyproject.toml .venv/.nodeready-project
fi
case $what in
docs | dist) install "requirements-$what.lock" ".nodeready-lock-$what" ;;
esac

# The newest torch, for jobs that really hang: an environment for each Python that is here. Three
# gigabytes come over the network once, and are hard links into uv's cache from then on. Where they
# cannot be had, the tests say what was left out; in CI that is a failure.
one_torch() {
    at=.venv-torch/$1
    cmp -s requirements-torch.lock "$at/.nodeready-lock" 2>/dev/null && return
    echo "setup: installing torch for $2 into $at (gigabytes, the first time)" >&2
    .venv/bin/uv venv --quiet --clear --python "$2" "$at" &&
        .venv/bin/uv pip sync --quiet --require-hashes --only-binary :all: \
            --python "$at/bin/python" requirements-torch.lock &&
        cp requirements-torch.lock "$at/.nodeready-lock"
}
torches() {
    found=
    for minor in 13 12 11 10; do
        for program in "python3.$minor" "$HOME/.pyenv/versions/3.$minor".*/bin/python3 "$python"; do
            "$program" -c "import sys; sys.exit(sys.version_info[:2] != (3, $minor))" 2>/dev/null ||
                continue
            one_torch "py3.$minor" "$(command -v "$program")" || return 1
            found=yes
            break
        done
    done
    [ -n "$found" ]
}
if [ "$what" = all ] && [ -z "${NODEREADY_TORCH+x}" ]; then
    torches || {
        echo "setup: no new torch: its hangs are not tried" >&2
        [ -z "${CI:-}" ]
    }
fi
