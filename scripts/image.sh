#!/bin/sh
# The image of Containerfile, from mmdebstrap's Debian instead of a registry's, and a run of it.
# Usage: scripts/image.sh   (root; buildah, mmdebstrap)
# It uses this machine's network, pip configuration and certificates. Nothing is left but the image
# localhost/nodeready.
set -eu
cd "$(dirname "$0")/.."
base=localhost/nodeready-base

container=$(buildah from scratch)
trap 'buildah rm "$container" >/dev/null; buildah rmi "$base" >/dev/null 2>&1 || :' EXIT
trap 'exit 130' HUP INT TERM
root=$(buildah mount "$container")
mmdebstrap --mode=root --variant=minbase --include=ca-certificates trixie "$root" >/dev/null
buildah commit --quiet "$container" "$base" >/dev/null

set -- --isolation chroot --network host
for file in /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do
    [ ! -e "$file" ] || set -- "$@" --volume "$file:$file:ro"
done
buildah build --quiet "$@" --build-arg "BASE=$base" --tag nodeready . >/dev/null
buildah rm "$container" >/dev/null
container=$(buildah from localhost/nodeready)
buildah run --isolation chroot "$container" nodeready --version
# No node answers there: 4.
status=0
buildah run --isolation chroot "$container" nodeready audit 127.0.0.2 --timeout 5 || status=$?
[ "$status" = 4 ]
