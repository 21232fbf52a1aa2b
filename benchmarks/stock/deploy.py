"""The settings of `nodeready deploy` as pyinfra's own operations, in the order of the playbook."""

from io import StringIO

import keys
from pyinfra import host
from pyinfra.facts.files import File
from pyinfra.facts.server import Command
from pyinfra.operations import apt, files, server

data = host.data
SERVICE = ["[Service]", "LimitCORE=infinity", "LimitMEMLOCK=infinity"]


def put(name: str, dest: str, *lines: str):  # type: ignore[no-untyped-def]
    text = StringIO("".join(f"{line}\n" for line in lines))
    return files.put(name=name, src=text, dest=dest, mode="644")


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
put(
    "Directory of core files at boot, and their end",
    "/etc/tmpfiles.d/00-cores.conf",
    f"d {data.nr_core_directory} 1777 root root {data.nr_core_retention_days}d",
)
put(
    "Limits of logins",
    "/etc/security/limits.d/zz-debug.conf",
    *(
        f"{domain} - {item} {data.get(f'nr_limit_{item}')}"
        for domain in data.nr_limit_domains
        for item in ("core", "memlock", "nofile")
    ),
)
for service in data.nr_limit_services:
    if host.get_fact(File, f"/lib/systemd/system/{service}.service"):
        path = f"/etc/systemd/system/{service}.service.d/zz-debug.conf"
        put(f"Limits of {service}", path, *SERVICE, f"LimitNOFILE={data.nr_limit_nofile}")
for shells, dest, line in (
    ("", "/etc/pdsh/rcmd_default", "ssh"),
    (", for login shells", "/etc/profile.d/zz-pdsh.sh", "export PDSH_RCMD_TYPE=ssh"),
    (
        ", for login shells of the other kind",
        "/etc/profile.d/zz-pdsh.csh",
        "setenv PDSH_RCMD_TYPE ssh",
    ),
):
    put(f"ssh for pdsh{shells}", dest, line)
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
put("Known hosts", "/etc/ssh/ssh_known_hosts", *keys.known_hosts())
put(
    "ssh client",
    "/etc/ssh/ssh_config.d/00-cluster.conf",
    f"Host {' '.join(data.nr_ssh_client_hosts)}",
    "    StrictHostKeyChecking yes",
    "    GlobalKnownHostsFile /etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2",
)
instinct = host.get_fact(
    Command,
    "for d in /sys/bus/pci/devices/*; do "
    "case $(cat $d/vendor $d/class 2>/dev/null | tr '\\n' ' ') in "
    "'0x1002 0x0380'*|'0x1002 0x1200'*) echo yes; break ;; esac; done; echo",
)
if instinct and "yes" in instinct:
    arguments = 'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX iommu=pt"'
    grub = put("IOMMU arguments", "/etc/default/grub.d/zz-iommu.cfg", arguments)
    server.shell(name="update-grub", commands=["update-grub"], _if=grub.did_change)
