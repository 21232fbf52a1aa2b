"""The settings of `nodeready deploy` as pyinfra's own operations, in the order of the playbook."""

from io import StringIO

import keys
from pyinfra import host
from pyinfra.facts.files import File
from pyinfra.facts.server import Command
from pyinfra.operations import apt, files, server

data = host.data


def text(lines: list[str]) -> StringIO:
    return StringIO("".join(f"{line}\n" for line in lines))


apt.packages(
    name="Packages",
    packages=data.nr_packages,
    extra_install_args=f"-o DPkg::Lock::Timeout={data.nr_package_lock_wait_s}",
)
files.put(name="py-spy", src=data.nr_py_spy, dest="/usr/local/bin/py-spy", mode="755")

for key, value in (
    ("kernel.yama.ptrace_scope", data.nr_ptrace_scope),
    ("kernel.core_pattern", data.nr_core_pattern),
):
    server.sysctl(
        name=f"Kernel value {key}",
        key=key,
        value=value,
        persist=True,
        persist_file="/etc/sysctl.d/99-zz-debug.conf",
    )

files.directory(name="Directory of core files", path=data.nr_core_directory, mode="1777")
files.put(
    name="Directory of core files at boot, and their end",
    src=text([f"d {data.nr_core_directory} 1777 root root {data.nr_core_retention_days}d"]),
    dest="/etc/tmpfiles.d/00-cores.conf",
    mode="644",
)
files.put(
    name="Limits of logins",
    src=text(
        [
            f"{domain} - {item} {data.get(f'nr_limit_{item}')}"
            for domain in data.nr_limit_domains
            for item in ("core", "memlock", "nofile")
        ]
    ),
    dest="/etc/security/limits.d/zz-debug.conf",
    mode="644",
)
for service in data.nr_limit_services:
    if host.get_fact(File, f"/lib/systemd/system/{service}.service"):
        files.put(
            name=f"Limits of {service}",
            src=text(
                [
                    "[Service]",
                    "LimitCORE=infinity",
                    "LimitMEMLOCK=infinity",
                    f"LimitNOFILE={data.nr_limit_nofile}",
                ]
            ),
            dest=f"/etc/systemd/system/{service}.service.d/zz-debug.conf",
            mode="644",
        )
files.put(name="ssh for pdsh", src=text(["ssh"]), dest="/etc/pdsh/rcmd_default", mode="644")
files.put(
    name="ssh for pdsh, for login shells",
    src=text(["export PDSH_RCMD_TYPE=ssh"]),
    dest="/etc/profile.d/zz-pdsh.sh",
    mode="644",
)
files.put(
    name="ssh for pdsh, for login shells of the other kind",
    src=text(["setenv PDSH_RCMD_TYPE ssh"]),
    dest="/etc/profile.d/zz-pdsh.csh",
    mode="644",
)
files.line(
    name="ssh for pdsh, for all sessions",
    path="/etc/environment",
    line="^PDSH_RCMD_TYPE=.*",
    replace="PDSH_RCMD_TYPE=ssh",
)
for user in data.nr_pdshrc_users:
    files.block(
        name=f"pdshrc of {user}",
        path=f"/home/{user}/.pdshrc",
        content=f"PATH={':'.join(data.nr_pdshrc_path)}:$PATH",
    )
    # files.block leaves it root's, and readable by root alone.
    files.file(
        name=f"pdshrc belongs to {user}",
        path=f"/home/{user}/.pdshrc",
        user=user,
        group=user,
        mode="644",
    )
files.put(
    name="Known hosts",
    src=text(keys.known_hosts()),
    dest="/etc/ssh/ssh_known_hosts",
    mode="644",
)
files.put(
    name="ssh client",
    src=text(
        [
            f"Host {' '.join(data.nr_ssh_client_hosts)}",
            "    StrictHostKeyChecking yes",
            "    GlobalKnownHostsFile /etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2",
        ]
    ),
    dest="/etc/ssh/ssh_config.d/00-cluster.conf",
    mode="644",
)
instinct = host.get_fact(
    Command,
    "for d in /sys/bus/pci/devices/*; do "
    "case $(cat $d/vendor $d/class 2>/dev/null | tr '\\n' ' ') in "
    "'0x1002 0x0380'*|'0x1002 0x1200'*) echo yes; break ;; esac; done; echo",
)
if instinct and "yes" in instinct:
    grub = files.put(
        name="IOMMU arguments",
        src=text(['GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX iommu=pt"']),
        dest="/etc/default/grub.d/zz-iommu.cfg",
        mode="644",
    )
    server.shell(name="update-grub", commands=["update-grub"], _if=grub.did_change)
