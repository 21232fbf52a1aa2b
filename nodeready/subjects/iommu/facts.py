"""The kernel arguments of a node: in force, at the next boot, and by GRUB's files.

Only the hardware is read on every node. The rest is read where the policy manages the arguments: a
node without an AMD Instinct starts no process for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from nodeready.core.base import Line, Output, Probe, ProbeError, Section, by_path, kernel_arguments
from nodeready.subjects.iommu.instincts import VENDOR
from nodeready.subjects.iommu.next_boot import (
    ENTRIES,
    GRUB_CFG,
    GRUBENV,
    LOADER_CONF,
    Entry,
    find_next_boot,
)

if TYPE_CHECKING:
    from nodeready.core.policy import Policy

DEFAULT_GRUB = "/etc/default/grub"
GRUB_D = "/etc/default/grub.d"
#: The variable in nodeready's file for GRUB that holds the arguments.
OWN_VARIABLE = "nodeready_args"

#: The scripts that write GRUB's entries from GRUB_CMDLINE_LINUX.
GENERATED = ("10_linux", "10_linux_zfs", "20_linux_xen", "")
_TOOLS = ("update-grub", "grub-mkconfig", "grubby", "grub2-mkconfig")


def _script(policy: Policy) -> str:
    if policy.iommu_args == ():
        return ":"
    assignment = "nr_amd=1" if policy.iommu_args else "nr_amd="
    pattern = (
        r"^[[:space:]]*(export[[:space:]]+)?GRUB_CMDLINE_LINUX|^[[:space:]]*(set )?[A-Za-z_]+=|"
        r"^(options|title|default)[[:space:]]|^[[:space:]]*linux(16|efi)?[[:space:]]|"
        r"^[[:space:]]*(menuentry|submenu|function)[[:space:]]|^[[:space:]]*}|"
        r"^[[:space:]]*blscfg|^### (BEGIN|END) "
    )
    return rf"""
    {assignment}
    for nr_dir in /sys/bus/pci/devices/*; do
        nr_line=
        {{ read -r nr_line <"$nr_dir/vendor"; }} 2>/dev/null
        if [ "$nr_line" = {VENDOR} ]; then
            nr_value device "$nr_dir/device"
            nr_amd=1
        fi
    done
    if [ -n "$nr_amd" ]; then
        nr_value cpus /sys/devices/system/cpu/online
        nr_value live /proc/cmdline
        while read -r nr_line; do
            case $nr_line in vendor_id*) printf 'cpu=%s\n' "${{nr_line##* }}"; break ;; esac
        done </proc/cpuinfo
        for nr_file in {" ".join(GRUB_CFG)} {ENTRIES}; do
            if [ -e "$nr_file" ] && [ ! -r "$nr_file" ]; then
                printf 'unreadable=%s\n' "$nr_file"
            fi
            for nr_own in {DEFAULT_GRUB} {GRUB_D}/*nodeready*.cfg; do
                if [ -f "$nr_file" ] && [ "$nr_file" -nt "$nr_own" ]; then
                    printf 'newer=%s %s\n' "$nr_own" "$nr_file"
                fi
            done
        done
        for nr_file in {GRUB_D}/*.cfg; do
            if [ -e "$nr_file" ]; then printf 'dropin=%s\n' "$nr_file"; fi
        done
        nr_have {" ".join(_TOOLS)}
        grep -asHnE '{pattern}' /etc/os-release {DEFAULT_GRUB} {GRUB_D}/*.cfg \
            {" ".join(GRUB_CFG)} {ENTRIES}/*.conf {LOADER_CONF} \
            {" ".join(GRUBENV)} /dev/null
        nr_exact {DEFAULT_GRUB}
    fi
    :
    """


@dataclass(frozen=True)
class Iommu:
    """The facts that decide a node's kernel arguments."""

    JSON_KEYS: ClassVar = {"own_line": "ours"}

    # PCI device ids of the node's AMD graphics and accelerators (``0x74a1``), sorted
    devices: tuple[str, ...] = ()
    cpus: int = 0  # logical CPUs online; of 256 and more the kernel finds 255 without an IOMMU
    cpu_vendor: str = ""  # AuthenticAMD, GenuineIntel, or ""
    live: tuple[str, ...] = ()  # the tokens of /proc/cmdline
    boot: tuple[Entry, ...] = ()  # the boot loader's entry of the next boot; () without one
    # the assignments of /etc/default/grub and grub.d/*.cfg, in the order of reading
    config: tuple[Line, ...] = ()
    family: str = ""  # debian, redhat, suse, or "" for another distribution
    # the installed ones of update-grub, grub-mkconfig, grubby, grub2-mkconfig
    tools: tuple[str, ...] = ()
    dropins: tuple[str, ...] = ()  # the files of grub.d, in the order of reading
    # the line of nodeready's file for GRUB with the arguments, or None
    own_line: Line | None = None
    generated: bool = False  # grub.cfg was written after nodeready's file
    unreadable: tuple[str, ...] = ()  # boot files that only root may read
    default_grub: bytes | None = None  # the bytes of /etc/default/grub; None: no such file
    entries: tuple[Entry, ...] = ()  # the other boot loader entries


def _count(ranges: str) -> int:
    """The number of CPUs in a kernel list such as ``0-127,256``. Raises ProbeError."""
    total = 0
    for part in ranges.strip().split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        if match is None:
            raise ProbeError("the list of CPUs makes no sense", ranges)
        total += int(match[2] or match[1]) - int(match[1]) + 1
    return total


def _family(lines: Iterable[Line]) -> str:
    """debian, redhat or suse, from ID and ID_LIKE of os-release(5)."""
    values: dict[str, str] = {}
    for line in lines:
        name, _, value = line.text.partition("=")
        values[name] = value.strip().strip("\"'")
    words = f"{values.get('ID', '')} {values.get('ID_LIKE', '')}".lower().split()
    families = {
        "debian": ("debian", "ubuntu"),
        "redhat": ("rhel", "fedora", "centos", "rocky", "almalinux"),
        "suse": ("suse", "sles", "opensuse", "sle_hpc"),
    }
    for word in words:
        for family, names in families.items():
            if word in names or (family == "suse" and word.startswith("opensuse")):
                return family
    return ""


def parse(outputs: Mapping[str, Output], policy: Policy) -> Iommu:
    """The observation. Raises ProbeError for a list of CPUs that makes no sense."""
    section = outputs["iommu"]
    # This line starts the content of a file, in which no line is an answer of the script.
    output = replace(section, text=section.require().partition(f"\n@{section.nonce} file ")[0])
    values = output.values()
    if "live" not in values:
        return Iommu(devices=tuple(sorted(output.all("device"))))
    files = by_path(output.lines())
    family = _family(files.get("/etc/os-release", ()))
    # Only Debian's grub-mkconfig reads grub.d.
    dropins = tuple(output.all("dropin")) if family == "debian" else ()
    config = [line for path in (DEFAULT_GRUB, *dropins) for line in files.get(path, ())]
    own_lines = [line for line in config if line.text.startswith(f"{OWN_VARIABLE}=")]
    newer = tuple(pair.partition(" ")[0] for pair in output.all("newer"))
    next_entry, other_entries = find_next_boot(files, family)
    return Iommu(
        devices=tuple(sorted(output.all("device"))),
        cpus=_count(values["cpus"]) if "cpus" in values else 0,
        cpu_vendor=values.get("cpu", ""),
        live=kernel_arguments(values["live"]),
        boot=(next_entry,) if next_entry else (),
        config=tuple(line for line in config if "GRUB_CMDLINE_LINUX" in line.text),
        family=family,
        tools=tuple(output.all("have")),
        dropins=dropins,
        own_line=own_lines[-1] if own_lines else None,
        generated=bool(own_lines) and own_lines[-1].path in newer,
        unreadable=tuple(output.all("unreadable")),
        default_grub=section.files().get(DEFAULT_GRUB),
        entries=other_entries,
    )


PROBE = Probe("iommu", (Section("iommu", _script),), parse)
