#!/bin/sh
# Run a command in a minimal Debian: mmdebstrap's minbase, make, git, ca-certificates, and a copy of
# this checkout as the working directory.
# Usage: scripts/fresh.sh SUITE COMMAND...      (SUITE: bookworm or trixie)
#
# The command is root in its own mount, PID, UTS and IPC namespaces. Its files lie in memory and
# vanish with it, also on Ctrl-C. It uses this machine's network and sources of packages: apt's
# mirrors and proxies, pip's configuration, the variables for proxies and certificates, the
# certificates of /usr/local/share/ca-certificates, and the files that any of these names (a
# file:// index). The downloads of apt and pip are kept for the next run. Run one at a time: two
# would start labs in the same subnet.
# Exit status: the command's; 1 where no Debian could be made, 2 for wrong usage.
# The Debian is made at most once a week, by mmdebstrap, and kept in
# ${XDG_CACHE_HOME:-~/.cache}/nodeready/fresh-SUITE; removing that is harmless.
set -eu

keyring=/usr/share/keyrings/debian-archive-keyring.gpg
checkout=/srv/checkout

fail() {
    echo "fresh: $2" >&2
    exit "$1"
}

# How this machine's apt gets at its mirrors, in apt's own words.
apt_options() {
    command -v apt-config >/dev/null || return 0
    apt-config dump --no-empty Acquire |
        grep -E '^Acquire::(http|https|Check-[A-Za-z-]+|Retries)(::| )' || :
}

# This machine's mirrors of Debian, for suite $1 and with the keyring of root $2; nothing where
# it has none.
apt_mirrors() {
    command -v apt-get >/dev/null || return 0
    # shellcheck disable=SC1091 # the machine's own
    here=$(. /etc/os-release && echo "${VERSION_CODENAME:-none}")
    signed=
    if [ -e "$2$keyring" ]; then signed="[signed-by=$keyring] "; fi
    # shellcheck disable=SC2016 # apt's variables
    apt-get indextargets --format '$(ORIGIN)|$(REPO_URI)|$(RELEASE)|$(COMPONENT)' \
        'Created-By: Packages' | sort -u |
        while IFS='|' read -r origin uri release component; do
            case $origin:$release in
            # The origin is known where the package lists were fetched.
            Debian:"$here" | Debian:"$here"-updates | Debian:"$here"-security | \
                :"$here" | :"$here"-updates | :"$here"-security)
                echo "deb $signed$uri $1${release#"$here"} $component"
                ;;
            esac
        done
}

# Make the minimal Debian of suite $1 at $2, with $2.new on the way there.
make_base() {
    command -v mmdebstrap >/dev/null ||
        fail 1 "mmdebstrap is not installed: apt-get install mmdebstrap"
    echo "fresh: making a minimal Debian $1" >&2
    packages=make,git,ca-certificates
    trap 'rm -rf --one-file-system -- "$2.new"' EXIT
    trap 'exit 130' HUP INT TERM
    rm -rf --one-file-system -- "$2" "$2.new"
    apt_mirrors "$1" "" >"$2.mirrors"
    apt_options >"$2.options"
    set -- "$1" "$2" mmdebstrap --mode=root --variant=minbase "--include=$packages" \
        --format=directory
    while read -r line; do set -- "$@" "--aptopt=$line"; done <"$2.options"
    set -- "$@" "$1" "$2.new"
    if [ -s "$2.mirrors" ]; then set -- "$@" "$2.mirrors"; fi
    suite=$1 made=$2
    shift 2
    # In namespaces of its own: when it is interrupted, no mount of it is left.
    if ! unshare --mount --pid --fork --kill-child --mount-proc "$@" >"$made.log" 2>&1; then
        cat "$made.log" >&2
        fail 1 "no Debian $suite could be made: $1 failed"
    fi
    rm -f "$made.new/etc/apt/apt.conf.d/99mmdebstrap"
    mv "$made.new" "$made"
    touch "$made"
    trap - EXIT HUP INT TERM
}

# Variables that say how to get at packages, or how to write to the terminal.
carried() {
    env | sed -n -E 's/^((https?|ftp|all|no)_proxy|(HTTPS?|FTP|ALL|NO)_PROXY|PIP_[A-Z_]+|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|GIT_SSL_CAINFO|CI|TERM|COLUMNS|NO_COLOR)=.*/\1/p'
}

# The user's own configuration of pip.
pip_config() {
    for file in "${XDG_CONFIG_HOME:-$HOME/.config}/pip/pip.conf" "$HOME/.pip/pip.conf"; do
        if [ -e "$file" ]; then
            echo "$file"
            return
        fi
    done
}

# Absolute paths that the configuration of pip and apt names. A file:// index has its packages
# beside it, so it counts with the directory that it is in.
named_paths() {
    {
        cat /etc/pip.conf "$(pip_config)" 2>/dev/null || :
        apt_options
        apt-config dump --no-empty Dir::Etc::trusted 2>/dev/null || :
        for name in $(carried); do
            eval "printf '%s\n' \"\$$name\""
        done
    } | tr ' ",;=' '\n' | sed -n -E 's,^file://(/[^/]+/.*)/[^/]+/?$,\1,p; t; s,^(file://)?(/[^/]+/.*)$,\2,p' |
        sort -u
}

# Bring what is outside into the root $1, at the same path: read-only, and only what is not
# there anyhow.
bring() {
    while read -r path; do
        if [ ! -e "$path" ] || [ -e "$1$path" ]; then continue; fi
        if [ -d "$path" ]; then
            mkdir -p "$1$path"
        else
            mkdir -p "$1${path%/*}"
            : >"$1$path"
        fi
        mount --bind "$path" "$1$path"
        mount -o remount,bind,ro "$1$path"
    done
}

# The root, from the minimal Debian $2 of suite $1; $3 is an empty directory to mount it on.
assemble() {
    mount -t tmpfs -o mode=755 fresh "$3"
    root=$3/root
    mkdir "$root" "$3/upper" "$3/work"
    if [ "$(stat -f -c %T "$2")" = overlayfs ]; then
        # Overlays stand on each other twice, not more (FILESYSTEM_MAX_STACK_DEPTH), and the
        # lab makes one, too.
        cp -a "$2/." "$root/"
        mount --bind "$root" "$root"
    else
        mount -t overlay -o "lowerdir=$2,upperdir=$3/upper,workdir=$3/work" fresh "$root"
    fi
    mount -t tmpfs -o nosuid,nodev,mode=755 fresh "$root/run"
    mkdir -m 1777 "$root/run/lock"
    mount --rbind /sys "$root/sys"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs -o nosuid,nodev,mode=1777 fresh "$root/dev/shm"
    mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
    for file in /etc/resolv.conf /etc/hosts /etc/pip.conf /etc/apt/auth.conf; do
        if [ -e "$file" ]; then
            rm -f "$root$file"
            cp -L "$file" "$root$file"
        fi
    done
    echo '127.0.1.1 fresh' >>"$root/etc/hosts"
    echo fresh >"$root/etc/hostname"
    apt_options >"$root/etc/apt/apt.conf.d/99fresh"
    apt_mirrors "$1" "$root" >"$root/etc/apt/sources.list.new"
    if [ -s "$root/etc/apt/sources.list.new" ]; then
        rm -f "$root/etc/apt/sources.list.d/"*
        mv "$root/etc/apt/sources.list.new" "$root/etc/apt/sources.list"
    fi
    if [ -n "$(ls /usr/local/share/ca-certificates 2>/dev/null)" ]; then
        cp -rL /usr/local/share/ca-certificates "$root/usr/local/share/"
        chroot "$root" update-ca-certificates >/dev/null 2>&1
    fi
    named_paths | bring "$root"
    mkdir -p "$2.apt/partial" "$2.pip" "$root/var/cache/apt/archives" "$root/var/cache/pip"
    mount --bind "$2.apt" "$root/var/cache/apt/archives"
    mount --bind "$2.pip" "$root/var/cache/pip"
    if [ -n "$(pip_config)" ]; then cp -L "$(pip_config)" "$root/etc/pip.user.conf"; fi
    mkdir "$root$checkout"
    # shellcheck disable=SC2016 # a script of its own: what is tracked may be deleted
    git -c safe.directory='*' ls-files -z -co --exclude-standard |
        xargs -0 sh -c 'for f; do [ ! -e "$f" ] && [ ! -L "$f" ] || printf "%s\0" "$f"; done' sh |
        tar --null --files-from=- --owner=0 --group=0 -c | tar -xC "$root$checkout"
    hostname fresh
}

case ${FRESH_STAGE:-} in
assemble)
    suite=$1 base=$2 place=$3
    shift 3
    assemble "$suite" "$base" "$place"
    if [ -e "$place/root/etc/pip.user.conf" ] && [ -z "${PIP_CONFIG_FILE:-}" ]; then
        export PIP_CONFIG_FILE=/etc/pip.user.conf
    fi
    set -- sh "$checkout/scripts/fresh.sh" "$@"
    for name in $(carried); do
        eval "value=\$$name"
        # shellcheck disable=SC2154 # by eval
        set -- "$name=$value" "$@"
    done
    set -- env -i HOME=/root LANG=C.UTF-8 PIP_CACHE_DIR=/var/cache/pip FRESH_STAGE=inside \
        PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"
    mkdir "$place/root/.outside"
    cd "$place/root"
    pivot_root . .outside
    exec chroot / "$@"
    ;;
inside)
    # Process 1 of the namespaces. Without a trap it would ignore the signal, and with its end all
    # that it has started ends.
    unset FRESH_STAGE
    cd "$checkout"
    umount -l /.outside
    rmdir /.outside
    trap 'exit 130' INT
    trap 'exit 143' HUP TERM
    status=0
    "$@" || status=$?
    exit "$status"
    ;;
esac

case ${1:-} in
bookworm | trixie) suite=$1 ;;
*) fail 2 "usage: scripts/fresh.sh bookworm|trixie COMMAND..." ;;
esac
shift
[ $# -gt 0 ] || fail 2 "usage: scripts/fresh.sh $suite COMMAND..."
[ "$(id -u)" = 0 ] || fail 2 "it makes namespaces and mounts: run it as root (sudo)"
cd "$(dirname "$0")/.."
export PATH="$PATH:/usr/sbin:/sbin"
cache=${XDG_CACHE_HOME:-$HOME/.cache}/nodeready
base=$cache/fresh-$suite
mkdir -p "$cache/fresh"
(
    flock 9
    if [ ! -d "$base" ] || [ -n "$(find "$base" -maxdepth 0 -mtime +7)" ]; then
        make_base "$suite" "$base"
    fi
) 9>"$base.lock"
export FRESH_STAGE=assemble
exec unshare --mount --pid --fork --kill-child --uts --ipc \
    sh scripts/fresh.sh "$suite" "$base" "$cache/fresh" "$@"
