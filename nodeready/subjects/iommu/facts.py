"""The kernel arguments of a node: in force, at the next boot, and what GRUB's files make of them.

Only the hardware is read on every node. The rest is read where the arguments are managed: a node
without an AMD Instinct starts no process for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from nodeready.policy import Policy
from nodeready.subjects.base import Line, Output, Probe, ProbeError, Section, by_path, file_lines

# --- Kernel command lines: their tokens, and how GRUB's configuration files make one.
#
# Rules: the kernel splits at white space outside double quotes, takes ``-`` and ``_`` in names for
# the same, and leaves what follows ``--`` to init (kernel/params.c,
# Documentation/admin-guide/kernel-parameters.rst).

#: Options whose values add up: a second token of such an option contradicts nothing.
REPEATABLE = frozenset({"pci", "console", "earlycon", "modprobe.blacklist", "rd.driver.blacklist"})
#: The variables that become the command line, in this order (grub-mkconfig's 10_linux).
VARIABLES = ("GRUB_CMDLINE_LINUX", "GRUB_CMDLINE_LINUX_DEFAULT")

_ASSIGNMENT = re.compile(
    rf"\s*(?:export\s+)?({'|'.join(reversed(VARIABLES))})=(.*?)\r?$", re.DOTALL
)
_PIECE = re.compile(r"\"((?:[^\"\\]|\\.)*)\"|'([^']*)'|\\(.)|([^\s\"'\\;&|<>()#`]+)", re.DOTALL)
_REFERENCE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")


def tokens(text: str) -> tuple[str, ...]:
    """The arguments that the kernel takes from a command line, in order, with their quotes."""
    found = re.findall(r"(?:[^\s\"]|\"[^\"]*(?:\"|$))+", text)
    return tuple(found[: found.index("--")] if "--" in found else found)


def option(token: str) -> str:
    """The name of the option that a token sets, as the kernel compares it: ``amd_iommu``."""
    return token.partition("=")[0].replace("-", "_")


def same(token: str, other: str) -> bool:
    """Whether two tokens set the same option to the same value."""
    return option(token) == option(other) and token.partition("=")[2] == other.partition("=")[2]


def missing(present: Iterable[str], wanted: Iterable[str]) -> tuple[str, ...]:
    """The wanted tokens that are not among the present ones."""
    there = tuple(present)
    return tuple(want for want in wanted if not any(same(token, want) for token in there))


def contradicting(present: Iterable[str], wanted: Iterable[str]) -> tuple[str, ...]:
    """The present tokens that give an option of a wanted token another value, each once."""
    wants = tuple(wanted)
    options = {option(want) for want in wants} - {name.replace("-", "_") for name in REPEATABLE}
    return tuple(
        dict.fromkeys(
            token
            for token in present
            if option(token) in options and not any(same(token, want) for want in wants)
        )
    )


def expand(text: str, variables: Mapping[str, str]) -> str:
    """``text`` with its ``$NAME`` and ``${NAME}`` replaced; unknown ones are empty."""
    return _REFERENCE.sub(lambda match: variables.get(match[1] or match[2], ""), text)


def _value(text: str, variables: Mapping[str, str]) -> str | None:
    """The value of a shell assignment's right side; None where only a shell can tell."""
    value = ""
    at = 0
    while at < len(text) and not text[at].isspace() and text[at] not in ";#":
        piece = _PIECE.match(text, at)
        if piece is None:
            return None
        double, single, escaped, bare = piece.groups()
        if single is not None:
            value += single
        elif escaped is not None:
            value += escaped
        else:
            part = double if double is not None else bare
            if "`" in part or "$(" in part or "\\\n" in part:
                return None
            expanded = expand(part, variables)
            value += re.sub(r"\\([\"\\$`])", r"\1", expanded) if double is not None else expanded
        at = piece.end()
    # Behind a backslash at the end, the assignment goes on in the next line.
    return None if text.rstrip().endswith("\\") else value


class Configured(NamedTuple):
    """What GRUB's configuration files set.

    tokens: of the resulting command line; None where only a shell can tell
    last:   the last line that assigns one of the variables, or None
    """

    tokens: tuple[str, ...] | None
    last: Line | None


def configured(lines: Iterable[Line]) -> Configured:
    """What the lines of /etc/default/grub and grub.d set, given in the order of reading."""
    values: dict[str, str] = {}
    last: Line | None = None
    readable = True
    for line in lines:
        match = _ASSIGNMENT.match(line.text)
        if match is None:
            readable = readable and "GRUB_CMDLINE_LINUX+=" not in line.text
            continue
        last = line
        value = _value(match[2], values)
        if value is None:
            readable = False
        else:
            values[match[1]] = value
    found: list[str] = []
    for variable in VARIABLES:
        found.extend(tokens(values.get(variable, "")))
    return Configured(tuple(found) if readable else None, last)


# --- AMD Instinct accelerators by PCI device id.
#
# Sources: ROCm/gpu-operator internal/utils.go (AMD's lists of physical and virtual functions),
# ROCm's Tensile (GFX_CHIP_IDS of gfx942 and gfx950), Linux'
# drivers/gpu/drm/amd/amdgpu/amdgpu_drv.c (Arcturus and Aldebaran), and pci.ids.

#: AMD's graphics and accelerators (its CPUs and chipsets are 0x1022).
VENDOR = "0x1002"


@dataclass(frozen=True)
class Model:
    """One kind of accelerator.

    name:       the product
    generation: 1 for MI100 (CDNA), 2 for MI200, 3 for MI300, 4 for MI350
    virtual:    an SR-IOV virtual function, as a guest sees it
    """

    name: str
    generation: int
    virtual: bool = False


MODELS: dict[str, Model] = {
    "0x7388": Model("MI100", 1),
    "0x738c": Model("MI100", 1),
    "0x738e": Model("MI100", 1),
    "0x7408": Model("MI250X", 2),
    "0x740c": Model("MI250", 2),
    "0x740f": Model("MI210", 2),
    "0x7410": Model("MI210 VF", 2, virtual=True),
    "0x74a0": Model("MI300A", 3),
    "0x74a1": Model("MI300X", 3),
    "0x74a2": Model("MI308X", 3),
    "0x74a3": Model("MI300 series", 3),
    "0x74a5": Model("MI325X", 3),
    "0x74a8": Model("MI308X HF", 3),
    "0x74a9": Model("MI300X HF", 3),
    "0x74b5": Model("MI300X VF", 3, virtual=True),
    "0x74b6": Model("MI308X", 3),
    "0x74b9": Model("MI325X VF", 3, virtual=True),
    "0x74bd": Model("MI300X HF", 3),
    "0x75a0": Model("MI350X", 4),
    "0x75a2": Model("MI350 series", 4),
    "0x75a3": Model("MI355X", 4),
    "0x75a8": Model("MI350 series", 4),
    "0x75b0": Model("MI350X VF", 4, virtual=True),
    "0x75b2": Model("MI350 series VF", 4, virtual=True),
    "0x75b3": Model("MI355X VF", 4, virtual=True),
    "0x75b8": Model("MI350 series VF", 4, virtual=True),
}


# --- The look at a node's boot loader, and what it showed.

DEFAULT_GRUB = "/etc/default/grub"
GRUB_D = "/etc/default/grub.d"
#: Where update-grub, grub2-mkconfig and the installers of RHEL put GRUB's own file.
GRUB_CFG = ("/boot/grub/grub.cfg", "/boot/grub2/grub.cfg", "/boot/efi/EFI/*/grub.cfg")
ENTRIES = "/boot/loader/entries"
GRUBENV = ("/boot/grub2/grubenv", "/boot/grub/grubenv")
#: The variable in our piece of GRUB's configuration that holds our arguments.
OURS = "nodeready_args"

_LINUX = re.compile(r"\s*linux(?:16|efi)?\s+\S+\s*(.*)$", re.DOTALL)
_TOOLS = ("update-grub", "grub-mkconfig", "grubby", "grub2-mkconfig")


def _script(policy: Policy) -> str:
    if policy.iommu_args == ():
        return ":"
    wanted = "nr_amd=1" if policy.iommu_args else "nr_amd="
    pattern = (
        r"^[[:space:]]*(export[[:space:]]+)?GRUB_CMDLINE_LINUX|^[[:space:]]*(set )?[A-Za-z_]+=|"
        r"^options[[:space:]]|^[[:space:]]*linux(16|efi)?[[:space:]]"
    )
    return rf"""
    {wanted}
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
            {" ".join(GRUB_CFG)} {ENTRIES}/*.conf {" ".join(GRUBENV)} /dev/null
        nr_exact {DEFAULT_GRUB}
    fi
    :
    """


@dataclass(frozen=True)
class Entry:
    """A kernel's command line in the boot loader's configuration: its line and its tokens."""

    where: str
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class Iommu:
    """What decides a node's kernel arguments.

    devices:      PCI device ids of the node's AMD graphics and accelerators (``0x74a1``), sorted
    cpus:         logical CPUs online; of 256 and more the kernel finds 255 without an IOMMU
    cpu_vendor:   AuthenticAMD, GenuineIntel, or ""
    live:         the tokens of /proc/cmdline
    boot:         command lines of the next boot: GRUB's first entry, or each boot loader entry
    config:       what /etc/default/grub and grub.d/*.cfg assign, in the order of reading
    family:       debian, redhat, suse, or "" for another distribution
    tools:        which of update-grub, grub-mkconfig, grubby, grub2-mkconfig are installed
    dropins:      the files of grub.d, in the order of reading
    ours:         the line that holds the arguments of our own piece of configuration, or None
    generated:    grub.cfg was written after our own piece of configuration
    unreadable:   boot files that only root may read
    default_grub: the bytes of /etc/default/grub; None: no such file
    """

    devices: tuple[str, ...] = ()
    cpus: int = 0
    cpu_vendor: str = ""
    live: tuple[str, ...] = ()
    boot: tuple[Entry, ...] = ()
    config: tuple[Line, ...] = ()
    family: str = ""
    tools: tuple[str, ...] = ()
    dropins: tuple[str, ...] = ()
    ours: Line | None = None
    generated: bool = False
    unreadable: tuple[str, ...] = ()
    default_grub: bytes | None = None


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


def _boot(files: Mapping[str, list[Line]], family: str) -> tuple[Entry, ...]:
    """The command lines of the next boot. On RHEL's family the boot loader entries decide."""
    variables: dict[str, str] = {}
    first: Entry | None = None
    for path, lines in files.items():
        if path.endswith("/grub.cfg"):
            for line in lines:
                match = _LINUX.match(line.text)
                if match and first is None:
                    first = Entry(line.where, tokens(match[1]))
                name, _, value = line.text.strip().partition("=")
                if name.startswith("set "):
                    variables.setdefault(name[4:], value.strip("\"'"))
        elif path in GRUBENV:
            pairs = (line.text.partition("=") for line in lines)
            variables.update({name: value for name, _, value in pairs})
    entries = tuple(
        Entry(line.where, tokens(expand(line.text[7:], variables)))
        for path, lines in files.items()
        if path.startswith(f"{ENTRIES}/") and "-rescue" not in path
        for line in lines
        if line.text.startswith("options")
    )
    if entries and (first is None or family == "redhat"):
        return entries
    return (first,) if first else ()


def parse(outputs: Mapping[str, Output], policy: Policy) -> Iommu:
    """The observation. Raises ProbeError for a list of CPUs that makes no sense."""
    whole = outputs["iommu"]
    # Behind this line stands the content of a file, in which no line is an answer of ours.
    output = replace(whole, text=whole.require().partition(f"\n@{whole.nonce} file ")[0])
    values = output.values()
    if "live" not in values:
        return Iommu(devices=tuple(sorted(output.all("device"))))
    files = by_path(file_lines(output.require()))
    family = _family(files.get("/etc/os-release", ()))
    # Only Debian's grub-mkconfig reads grub.d.
    dropins = tuple(output.all("dropin")) if family == "debian" else ()
    config = [line for path in (DEFAULT_GRUB, *dropins) for line in files.get(path, ())]
    ours = [line for line in config if line.text.startswith(f"{OURS}=")]
    newer = tuple(pair.partition(" ")[0] for pair in output.all("newer"))
    return Iommu(
        devices=tuple(sorted(output.all("device"))),
        cpus=_count(values["cpus"]) if "cpus" in values else 0,
        cpu_vendor=values.get("cpu", ""),
        live=tokens(values["live"]),
        boot=_boot(files, family),
        config=tuple(line for line in config if "GRUB_CMDLINE_LINUX" in line.text),
        family=family,
        tools=tuple(output.all("have")),
        dropins=dropins,
        ours=ours[-1] if ours else None,
        generated=bool(ours) and ours[-1].path in newer,
        unreadable=tuple(output.all("unreadable")),
        default_grub=whole.files().get(DEFAULT_GRUB),
    )


PROBE = Probe("iommu", (Section("iommu", _script),), parse)
