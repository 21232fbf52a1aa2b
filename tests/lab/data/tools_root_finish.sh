set -e
rm -rf /usr/bin/apt* /usr/bin/dpkg* /var/lib/dpkg /var/lib/apt /var/cache/apt
mkdir -p /etc/rpm /etc/dnf/vars /etc/yum.repos.d /etc/zypp/repos.d /var/lib/rpm /srv
# Debian's rpm keeps its records in the home directory.
echo '%_dbpath /var/lib/rpm' >/etc/rpm/macros
rpm --initdb
echo 9 >/etc/dnf/vars/releasever
# As RHEL 9 has it.
cat >/etc/dnf/dnf.conf <<END
[main]
gpgcheck=1
installonly_limit=3
clean_requirements_on_remove=True
best=True
skip_if_unavailable=False
END
for repository in local broken; do
    enabled=$([ $repository = local ] && echo 1 || echo 0)
    printf '[%s]\nname=%s\nbaseurl=file:///srv/%s\nenabled=%s\ngpgcheck=0\n' \
        $repository $repository $repository $enabled | tee /etc/yum.repos.d/$repository.repo \
        >/etc/zypp/repos.d/$repository.repo
done
cd /tmp
# package NAME FILE REPOSITORY LINES: a package with one program, or another file.
package() {
    cat >"$1.spec" <<END
Name: $1
Version: 1
Release: 1
Summary: $1
License: MIT
BuildArch: noarch
AutoReqProv: no
$4
%description
$1
%install
mkdir -p %{buildroot}$(dirname "$2")
printf '#!/bin/sh\necho here\n' >%{buildroot}$2
chmod 755 %{buildroot}$2
%files
$2
$5
END
    rpmbuild -bb --quiet --define "_rpmdir /srv/$3" "$1.spec"
}
for name in gdb strace pdsh; do package $name /usr/bin/$name local; done
package pdsh-rcmd-ssh /usr/lib64/pdsh/sshcmd.so local
package pdsh /usr/bin/pdsh broken 'Requires: nr-nowhere >= 3'
# Holds the locks of its installation as long as /run/slow exists.
package nr-slow /usr/bin/nr-slow local '' '%post -p <lua>
io.open("/run/holds", "w"):close()
while posix.access("/run/slow") do posix.sleep(1) end'
for repository in local broken; do createrepo_c -q /srv/$repository; done
rm -rf /tmp/*
