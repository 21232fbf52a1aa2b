#!/bin/sh
# dist/nodeready_VERSION+SUITE_ARCH.deb: this checkout and its locked dependencies, in a virtual
# environment under /opt/nodeready. It is for the Debian (or Ubuntu) on which it is built, because
# the environment belongs to that Python.
# Usage: scripts/deb.sh   (needs no root, but python3-venv)
set -eu
cd "$(dirname "$0")/.."
umask 022

# shellcheck disable=SC1091 # the machine's own
suite=$(. /etc/os-release && echo "$ID$VERSION_ID")
architecture=$(dpkg --print-architecture)
python=$(/usr/bin/python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
trap 'exit 130' HUP INT TERM
root=$stage/root
home=$root/opt/nodeready
/usr/bin/python3 -m venv "$home"
set -- "$home/bin/pip" install --quiet --disable-pip-version-check --no-compile
"$@" --require-hashes --only-binary :all: -r requirements-install.lock
"$@" --no-deps --no-build-isolation .
version=$("$home/bin/python" -c 'import nodeready; print(nodeready.__version__)')
# What built it; a py-spy of another version comes from NODEREADY_PY_SPY_DIR.
"$home/bin/python" -m pip uninstall --quiet --yes hatchling trove-classifiers pathspec pluggy
"$home/bin/python" -m pip uninstall --quiet --yes setuptools pip 2>/dev/null
find "$home" -name __pycache__ -prune -exec rm -rf {} +
rm -f "$home"/bin/[Aa]ctivate*
grep -rIl "$home" "$home/bin" "$home/pyvenv.cfg" | xargs sed -i "s,$home,/opt/nodeready,g"

mkdir -p "$root/usr/bin" "$root/usr/share/man/man1" "$root/usr/share/doc/nodeready" "$root/DEBIAN"
ln -s /opt/nodeready/bin/nodeready "$root/usr/bin/nodeready"
ln -s /opt/nodeready/share/nodeready "$root/usr/share/nodeready"
gzip -9n <"$home/share/man/man1/nodeready.1" >"$root/usr/share/man/man1/nodeready.1.gz"
rm -rf "$home/share/man"
cp LICENSE "$root/usr/share/doc/nodeready/copyright"
gzip -9n <CHANGELOG.md >"$root/usr/share/doc/nodeready/changelog.gz"

cat >"$root/DEBIAN/control" <<END
Package: nodeready
Version: $version+$suite
Architecture: $architecture
Maintainer: the nodeready developers <nodeready@localhost>
Installed-Size: $(du -sk --apparent-size "$root" | cut -f 1)
Depends: python3 (>= $python), python3 (<< ${python%.*}.$((${python#*.} + 1))), openssh-client
Suggests: clustershell, slurm-client
Section: admin
Priority: optional
Description: makes every node of a GPU cluster debuggable, and proves it
 Deploys and audits the settings by which jobs can be debugged, proves before a
 job that they work, and finds the rank that holds up a job.
END
# The code is compiled where it is installed: the package is smaller, and the paths are right.
cat >"$root/DEBIAN/postinst" <<'END'
#!/bin/sh
set -e
if [ "$1" = configure ]; then
    /opt/nodeready/bin/python -I -m compileall -qq -j 0 /opt/nodeready/lib || :
fi
END
cat >"$root/DEBIAN/prerm" <<'END'
#!/bin/sh
set -e
find /opt/nodeready -name __pycache__ -prune -exec rm -rf {} +
END
chmod 755 "$root/DEBIAN/postinst" "$root/DEBIAN/prerm"
mkdir -p dist
(cd "$root" && find opt usr -type f -exec md5sum {} +) >"$root/DEBIAN/md5sums"
file=dist/nodeready_$version+${suite}_$architecture.deb
dpkg-deb --root-owner-group -Zxz --build "$root" "$file" >/dev/null
sha256sum "$file"
