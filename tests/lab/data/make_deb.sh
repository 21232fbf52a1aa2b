
set -e
build=/tmp/build/$1
mkdir -p $build/DEBIAN $build/usr/bin /srv/repo
printf '#!/bin/sh\necho here\n' >$build/usr/bin/$1
chmod 755 $build/usr/bin/$1
{
    printf 'Package: %s\nVersion: 1.0\nArchitecture: all\n' $1
    printf 'Maintainer: nobody\nDescription: a command for a test\n%s' "$2"
} >$build/DEBIAN/control
cd /srv/repo
dpkg-deb -b $build $1.deb >/dev/null
{
    cat $build/DEBIAN/control
    printf 'Filename: ./%s.deb\nSize: %s\n' $1 $(stat -c %s $1.deb)
    printf 'SHA256: %s\n\n' $(sha256sum <$1.deb | head -c 64)
} >>Packages
printf 'Date: Thu, 01 Jan 2026 00:00:00 UTC\nSHA256:\n %s %s Packages\n' \
    $(sha256sum <Packages | head -c 64) $(stat -c %s Packages) >Release
