"""The versions of the packages that jobs and debuggers use: read by the subject host."""

from __future__ import annotations

import re
from functools import lru_cache

#: Software -> the names of its package, in Debian, Red Hat, SUSE and Alpine.
PACKAGES: dict[str, tuple[str, ...]] = {
    "glibc": ("libc6", "glibc", "musl"), "python3": ("python3",),
    "openssh": ("openssh-server", "openssh"), "gdb": ("gdb",), "strace": ("strace",),
    "pdsh": ("pdsh",), "slurm": ("slurmd", "slurm-slurmd", "slurm-smd-slurmd", "slurm-node"),
    "rdma_core": ("rdma-core",), "nccl": ("libnccl2", "libnccl"),
}  # fmt: skip
_ALL = [name for names in PACKAGES.values() for name in names]

_DPKG_STATUS = "/var/lib/dpkg/status"
_APK = "/lib/apk/db/installed"

# In a record of dpkg, the version is at most twelve lines below the name.
VERSIONS_SCRIPT = rf"""
if [ -r {_DPKG_STATUS} ]; then
    printf 'packages=dpkg\n'
    grep -asE -A12 '^Package: ({"|".join(_ALL)})$' {_DPKG_STATUS}
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
    versions: dict[str, str] = {}
    for record in re.split(r"^(?=Package: )|^$", text, flags=re.M):
        fields = dict(re.findall(r"^(Package|Status|Version): (.{1,200})$", record, re.M))
        if fields.get("Status", "").endswith(" installed") and "Version" in fields:
            versions.setdefault(fields.get("Package", ""), fields["Version"])
    return versions


def parse_versions(text: str) -> dict[str, str]:
    """Software -> the version of its package; without missing packages. Never raises."""
    match = re.search(r"^packages=(dpkg|apk|rpm)\n(.*?)(?:^packages=end$|\Z)", text, re.M | re.S)
    return dict(_versions(match[1], match[2])) if match else {}


@lru_cache(maxsize=64)
def _versions(how: str, text: str) -> tuple[tuple[str, str], ...]:
    # Thousands of nodes have the same packages.
    if how == "dpkg":
        versions = _dpkg(text)
    elif how == "apk":
        versions = dict(re.findall(r"^P:(\S+)\nV:(\S+)$", text, re.M))
    else:
        # Several versions of one package may be installed: rpm prints the newest last.
        versions = dict(re.findall(r"^(\S+) (\S+)$", text, re.M))
    return tuple(
        (software, next(versions[name] for name in names if name in versions))
        for software, names in PACKAGES.items()
        if any(name in versions for name in names)
    )
