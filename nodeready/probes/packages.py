"""Versions of what jobs and debuggers stand on, as the package manager spells them."""

from __future__ import annotations

import re

#: What it is -> the packages that it comes in: Debian's, Red Hat's, SUSE's and Alpine's names.
NAMES: dict[str, tuple[str, ...]] = {
    "glibc": ("libc6", "glibc", "musl"),
    "python3": ("python3",),
    "openssh": ("openssh-server", "openssh"),
    "gdb": ("gdb",),
    "strace": ("strace",),
    "pdsh": ("pdsh",),
    "slurm": ("slurmd", "slurm-slurmd", "slurm-smd-slurmd", "slurm-node"),
    "rdma_core": ("rdma-core",),
    "nccl": ("libnccl2", "libnccl"),
}
_ALL = [name for names in NAMES.values() for name in names]

_DPKG = "/var/lib/dpkg/status"
_APK = "/lib/apk/db/installed"

# In a record of dpkg's, the version stands at most twelve lines below the name.
SCRIPT = rf"""
if [ -r {_DPKG} ]; then
    printf 'packages=dpkg\n'
    grep -asE -A12 '^Package: ({"|".join(_ALL)})$' {_DPKG}
elif [ -r {_APK} ]; then
    printf 'packages=apk\n'
    grep -asE -A1 '^P:({"|".join(_ALL)})$' {_APK}
elif command -v rpm >/dev/null; then
    printf 'packages=rpm\n'
    timeout -k 1 4 rpm -q --qf '%{{NAME}} %{{VERSION}}-%{{RELEASE}}\n' {" ".join(_ALL)} 2>/dev/null
fi
printf 'packages=end\n'
"""


def _dpkg(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for record in re.split(r"^(?=Package: )|^$", text, flags=re.M):
        fields = dict(re.findall(r"^(Package|Status|Version): (.{1,200})$", record, re.M))
        if fields.get("Status", "").endswith(" installed") and "Version" in fields:
            found.setdefault(fields.get("Package", ""), fields["Version"])
    return found


def parse(text: str) -> dict[str, str]:
    """What is installed -> its version; what is not installed is left out. Never raises."""
    match = re.search(r"^packages=(dpkg|apk|rpm)\n(.*?)(?:^packages=end$|\Z)", text, re.M | re.S)
    if match is None:
        return {}
    if match[1] == "dpkg":
        found = _dpkg(match[2])
    elif match[1] == "apk":
        found = dict(re.findall(r"^P:(\S+)\nV:(\S+)$", match[2], re.M))
    else:
        # Several versions of one package may be installed: the last that rpm names is the newest.
        found = dict(re.findall(r"^(\S+) (\S+)$", match[2], re.M))
    return {
        what: next(found[name] for name in names if name in found)
        for what, names in NAMES.items()
        if any(name in found for name in names)
    }
