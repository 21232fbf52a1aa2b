"""The debugging tools of a node: which are installed, what installs them, its py-spy, and the
versions of the packages that jobs and debuggers stand on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from nodeready import shell
from nodeready.policy import Policy
from nodeready.subjects.base import Output, Probe, ProbeError, Section

PY_SPY = "/usr/local/bin/py-spy"
_DPKG = "/var/lib/dpkg/info"
#: In the order of preference: Debian and openSUSE can have dnf installed as well.
MANAGERS = ("apt-get", "zypper", "dnf", "yum")


def _script(policy: Policy) -> str:
    # A package counts as installed when a command of its name is there (built by hand, from a
    # module tree), or when the package manager has it: not every package has such a command.
    names = " ".join(shell.quote(name) for name in policy.packages)
    packages = rf"""
    nr_missing=
    for nr_name in {names}; do
        nr_found=
        if command -v "$nr_name" >/dev/null 2>&1; then nr_found=1; fi
        for nr_file in {_DPKG}/"$nr_name".md5sums {_DPKG}/"$nr_name":*.md5sums; do
            if [ -e "$nr_file" ]; then nr_found=1; fi
        done
        if [ -z "$nr_found" ] && [ ! -d {_DPKG} ] && command -v rpm >/dev/null; then
            if rpm -q "$nr_name" >/dev/null 2>&1; then nr_found=1; fi
        fi
        if [ -z "$nr_found" ]; then printf 'missing=%s\n' "$nr_name"; fi
    done
    nr_have {" ".join(MANAGERS)}
    """
    py_spy = rf"""
    nr_line=
    {{ read -r nr_line </proc/sys/kernel/arch; }} 2>/dev/null
    printf 'machine=%s\n' "${{nr_line:-$(uname -m)}}"
    if [ -e {PY_SPY} ]; then
        printf 'mode=%s\n' "$(stat -Lc %a {PY_SPY})"
        nr_say version "$(timeout -k 1 2 {PY_SPY} --version 2>/dev/null)"
    fi
    """
    parts = [packages if policy.packages else "", py_spy if policy.py_spy_version else "", ":"]
    return "\n".join(parts)


@dataclass(frozen=True)
class DebugTools:
    """What a debugging session finds on the node.

    missing:  the policy's packages that are not installed, in the policy's order
    manager:  apt-get, zypper, dnf or yum; "" when the node has none of them
    machine:  ``uname -m``; "" when the policy leaves py-spy alone
    py_spy:   the version that /usr/local/bin/py-spy prints; "" when the file does not run; None:
              no such file
    mode:     permission bits of that file
    """

    missing: tuple[str, ...] = ()
    manager: str = ""
    machine: str = ""
    py_spy: str | None = None
    mode: int = 0


def parse(outputs: Mapping[str, Output], policy: Policy) -> DebugTools:
    """The observation. Raises ProbeError for a machine or mode that makes no sense."""
    output = outputs["debug_tools"]
    values = output.values()
    machine = values.get("machine", "")
    if policy.py_spy_version and not re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", machine):
        raise ProbeError("uname -m makes no sense", machine)
    mode = values.get("mode", "")
    if "mode" in values and not re.fullmatch(r"[0-7]{1,5}", mode):
        raise ProbeError(f"the mode of {PY_SPY} is no mode", mode)
    have = output.all("have")
    said = re.fullmatch(r"py-spy (\d[\w.+-]*)", values.get("version", ""))
    return DebugTools(
        missing=tuple(name for name in policy.packages if name in output.all("missing")),
        manager=next((name for name in MANAGERS if name in have), ""),
        machine=machine,
        py_spy=(said[1] if said else "") if "version" in values else None,
        mode=int(mode, 8) if mode else 0,
    )


PROBE = Probe("debug_tools", (Section("debug_tools", _script),), parse)


# --- Versions of the packages that jobs and debuggers stand on: read by the subject host.

#: Software -> the names of its package, in Debian, Red Hat, SUSE and Alpine.
PACKAGES: dict[str, tuple[str, ...]] = {
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
_ALL = [name for names in PACKAGES.values() for name in names]

_DPKG_QUERY = "/var/lib/dpkg/status"
_APK = "/lib/apk/db/installed"

# In a record of dpkg's, the version stands at most twelve lines below the name.
VERSIONS_SCRIPT = rf"""
if [ -r {_DPKG_QUERY} ]; then
    printf 'packages=dpkg\n'
    grep -asE -A12 '^Package: ({"|".join(_ALL)})$' {_DPKG_QUERY}
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


def parse_versions(text: str) -> dict[str, str]:
    """Software -> the version of its package; without what is not installed. Never raises."""
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
        for what, names in PACKAGES.items()
        if any(name in found for name in names)
    }
