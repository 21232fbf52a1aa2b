"""The kernel arguments of a node: in force, at the next boot, and by GRUB's files.

Only the hardware is read on every node. The rest is read where the policy manages the arguments: a
node without an AMD Instinct starts no process for it.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from nodeready.core import shell
from nodeready.core.base import Line, Output, Probe, ProbeError, Section, by_path, kernel_arguments

if TYPE_CHECKING:
    from nodeready.core.policy import Policy

# --- AMD's accelerators and graphics by PCI device id.
#
# Sources: ROCm/gpu-operator internal/utils.go (AMD's lists of physical and virtual functions),
# ROCm's Tensile (GFX_CHIP_IDS of gfx942 and gfx950), Linux'
# drivers/gpu/drm/amd/amdgpu/amdgpu_drv.c (Arcturus and Aldebaran), and pci.ids.

#: AMD's graphics and accelerators (its CPUs and chipsets are 0x1022).
VENDOR = "0x1002"


@dataclass(frozen=True)
class Model:
    """One kind of accelerator."""

    name: str  # the product
    generation: int  # 1 for MI100 (CDNA), 2 for MI200, 3 for MI300, 4 for MI350
    virtual: bool = False  # an SR-IOV virtual function, as a guest sees it


MODELS: dict[str, Model] = {
    "0x7388": Model("MI100", 1), "0x738c": Model("MI100", 1), "0x738e": Model("MI100", 1),
    "0x7408": Model("MI250X", 2), "0x740c": Model("MI250", 2), "0x740f": Model("MI210", 2),
    "0x7410": Model("MI210 VF", 2, virtual=True), "0x74a0": Model("MI300A", 3),
    "0x74a1": Model("MI300X", 3), "0x74a2": Model("MI308X", 3),
    "0x74a3": Model("MI300 series", 3), "0x74a5": Model("MI325X", 3),
    "0x74a8": Model("MI308X HF", 3), "0x74a9": Model("MI300X HF", 3),
    "0x74b5": Model("MI300X VF", 3, virtual=True), "0x74b6": Model("MI308X", 3),
    "0x74b9": Model("MI325X VF", 3, virtual=True), "0x74bd": Model("MI300X HF", 3),
    "0x75a0": Model("MI350X", 4), "0x75a2": Model("MI350 series", 4),
    "0x75a3": Model("MI355X", 4), "0x75a8": Model("MI350 series", 4),
    "0x75b0": Model("MI350X VF", 4, virtual=True),
    "0x75b2": Model("MI350 series VF", 4, virtual=True),
    "0x75b3": Model("MI355X VF", 4, virtual=True),
    "0x75b8": Model("MI350 series VF", 4, virtual=True),
}  # fmt: skip


#: Boards of the years before the list of Instincts: MI50 and MI60 (pci.ids).
_OLDER = ("0x66a0", "0x66a1")


def is_server_board(device: str) -> bool:
    """Whether this device (``0x74a1``) is a board for servers: RAS counts, and all its lanes."""
    return device in MODELS or device in _OLDER


#: How the device ids of a processor's own graphics begin (Linux' amdgpu_drv.c, AMD_IS_APU). The
#: MI300A is a processor, too, and an accelerator.
_INTEGRATED = ("11", "13", "15", "16", "19", "98")


def is_integrated(device: str) -> bool:
    """Whether this PCI device (four hex digits) is the graphics of a processor."""
    return device[:2] in _INTEGRATED and f"0x{device}" not in MODELS


# --- Kernel command lines: their tokens, and how GRUB's configuration files make one.
#
# Rules: the kernel splits at white space outside double quotes, treats ``-`` and ``_`` in names as
# equal, and leaves the words after ``--`` to init (kernel/params.c,
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


def option(token: str) -> str:
    """The name of the option that a token sets, as the kernel compares it: ``amd_iommu``."""
    return token.partition("=")[0].replace("-", "_")


#: Words that change nothing about another word of the same option.
#: Sources: Documentation/admin-guide/kernel-parameters.txt, arch/x86/kernel/pci-dma.c and
#: amd_gart_64.c (iommu=), drivers/iommu/intel/iommu.c and drivers/iommu/amd/init.c. ``on`` is no
#: word of amd_iommu: the kernel passes over it.
HARMLESS = {
    "iommu": re.compile(
        r"(no)?force|(no)?panic|(no)?merge|biomerge|forcesac|allowdac|nodac|usedac|group_mf|"
        r"(no)?fullflush|noagp|noaperture|memaper(=\d+)?|leak(=\d+)?|\d+[kKmMgG]?"
    ),
    "intel_iommu": re.compile(
        r"igfx_off|forcedac|strict|sp_off|sm_on|sm_off|tboot_noforce|nobounce|ecs_off|pasid28"
    ),
    "amd_iommu": re.compile(
        r"on|(no)?fullflush|force_isolation|force_enable|irtcachedis|nohugepages|v2_pgsizes_only"
    ),
}

#: Options of another spelling: drivers/iommu/iommu.c, iommu_set_def_domain_type.
_YES, _NO = ("1", "y", "t", "on", "yes", "true"), ("0", "n", "f", "off", "no", "false")
PASSTHROUGH = "iommu.passthrough"


def words(token: str) -> tuple[tuple[str, str], ...]:
    """The settings of a token: pairs of an option and one word of its comma list.

    Quotes belong to the command line. ``iommu.passthrough=1`` is ``iommu=pt``.
    """
    name, value = option(token.replace('"', "")), token.replace('"', "").partition("=")[2]
    if name == PASSTHROUGH and value.lower() in (*_YES, *_NO):
        return (("iommu", "pt" if value.lower() in _YES else "nopt"),)
    if name not in HARMLESS:
        return ((name, value),)
    return tuple((name, word) for word in value.split(",") if word) or ((name, ""),)


def same(token: str, other: str) -> bool:
    """Whether two tokens set the same option to the same value."""
    return words(token) == words(other)


def missing(present: Iterable[str], required: Iterable[str]) -> tuple[str, ...]:
    """The required tokens that are not among the present tokens."""
    present_words = {word for token in present for word in words(token)}
    return tuple(token for token in required if not present_words.issuperset(words(token)))


def contradicting(present: Iterable[str], required: Iterable[str]) -> tuple[str, ...]:
    """The present tokens that set an option of a required token to another value, each once."""
    wants = {word for token in required for word in words(token)}
    options = {name for name, _ in wants} - {name.replace("-", "_") for name in REPEATABLE}

    def against(name: str, word: str) -> bool:
        if name not in options or (name, word) in wants:
            return False
        harmless = HARMLESS.get(name)
        return harmless is None or not harmless.fullmatch(word)

    return tuple(
        dict.fromkeys(token for token in present if any(against(*pair) for pair in words(token)))
    )


def expand(text: str, variables: Mapping[str, str]) -> str:
    """``text`` with its ``$NAME`` and ``${NAME}`` replaced; unknown variables are empty."""
    return _REFERENCE.sub(lambda match: variables.get(match[1] or match[2], ""), text)


def _value(text: str, variables: Mapping[str, str]) -> str | None:
    """The value of a shell assignment's right side; None where only a shell can expand it."""
    value, at = "", 0
    while at < len(text) and not text[at].isspace() and text[at] not in ";#":
        if (match := _PIECE.match(text, at)) is None:
            return None
        double, single, escaped, bare = match.groups()
        if single is not None or escaped is not None:
            value += single or escaped or ""
        else:
            part = double if double is not None else bare
            if "`" in part or "$(" in part or "\\\n" in part:
                return None
            expanded = expand(part, variables)
            value += re.sub(r"\\([\"\\$`])", r"\1", expanded) if double is not None else expanded
        at = match.end()
    # After a backslash at the end, the assignment continues in the next line.
    return None if text.rstrip().endswith("\\") else value


class Configured(NamedTuple):
    """The kernel arguments in GRUB's configuration files."""

    tokens: tuple[str, ...] | None  # of the command line; None where only a shell can expand it
    last: Line | None  # the last line that assigns one of the variables, or None


def configured(lines: Iterable[Line]) -> Configured:
    """The arguments that /etc/default/grub and grub.d set; ``lines`` in the order of reading."""
    values: dict[str, str] = {}
    last, readable = None, True
    for line in lines:
        if (match := _ASSIGNMENT.match(line.text)) is None:
            readable = readable and "GRUB_CMDLINE_LINUX+=" not in line.text
            continue
        last = line
        if (value := _value(match[2], values)) is None:
            readable = False
        else:
            values[match[1]] = value
    tokens = tuple(t for name in VARIABLES for t in kernel_arguments(values.get(name, "")))
    return Configured(tokens if readable else None, last)


# --- The boot loader's entry of the next boot, and its kernel command line.
#
# From GRUB's manual ("default", "The GRUB environment block") and its source
# (grub-core/normal/menu.c): ``next_entry`` of the environment decides once, else the ``default``
# of grub.cfg, which mostly is ``saved_entry`` or a number. A default names an entry by its number
# in its menu, its title or its id; ``>`` leads into a submenu (``>>`` is a character of a title).
# The first entry boots where the default names no entry. RHEL's blscfg sorts the boot loader
# entries by their files' names, newest first.

#: The files of GRUB that update-grub, grub2-mkconfig and the installers of RHEL write.
GRUB_CFG = ("/boot/grub/grub.cfg", "/boot/grub2/grub.cfg", "/boot/efi/EFI/*/grub.cfg")
ENTRIES = "/boot/loader/entries"
GRUBENV = ("/boot/grub2/grubenv", "/boot/grub/grubenv")
_LINUX = re.compile(r"\s*linux(?:16|efi)?\s+\S+\s*(.*)$", re.DOTALL)
_MENU = re.compile(r"\s*(menuentry|submenu|function)\s+(.*)$", re.DOTALL)
_WORD = re.compile(r"(?:'[^']*'|\"(?:[^\"\\]|\\.)*\"|\\.|[^\s'\"\\])+", re.DOTALL)
_BEGIN = re.compile(r"### BEGIN (\S+) ###")
LOADER_CONF = "/boot/loader/loader.conf"


@dataclass(frozen=True)
class Entry:
    """A kernel's command line in the boot loader's configuration."""

    JSON_KEYS: ClassVar = {"source": "where"}
    source: str  # the line of the configuration file
    tokens: tuple[str, ...]  # the arguments
    script: str = ""  # name of the script of /etc/grub.d that wrote the line; "": not marked


@dataclass
class _Item:
    names: tuple[str, ...] = ()
    menu: list[_Item] | None = None
    kernel: Entry | None = None


def _boot_menu(lines: Iterable[Line]) -> list[_Item]:
    """GRUB's menu in the lines of grub.cfg; a kernel outside of all entries is an entry, too."""
    top: list[_Item] = []
    stack: list[_Item] = [_Item(menu=top)]
    script = ""
    for line in lines:
        text = line.text.strip()
        begin, opens, kernel = _BEGIN.match(text), _MENU.match(text), _LINUX.match(line.text)
        if begin:
            script = begin[1].rpartition("/")[2]
        elif opens:
            arguments = [re.sub(r"['\"]|\\(?=.)", "", word) for word in _WORD.findall(opens[2])]
            names = [arguments[0]] if arguments else []
            for flag, value in zip(arguments, arguments[1:]):
                if flag in ("$menuentry_id_option", "--id"):
                    names.append(value)
            names += [word[5:] for word in arguments if word.startswith("--id=")]
            item = _Item(tuple(names), [] if opens[1] == "submenu" else None)
            menu = stack[-1].menu
            if opens[1] != "function" and menu is not None:
                menu.append(item)
            if text.endswith("{"):
                stack.append(item)
        elif text.startswith("}"):
            if len(stack) > 1:
                stack.pop()
        elif kernel:
            entry = Entry(line.source, kernel_arguments(kernel[1]), script)
            if len(stack) == 1:
                top.append(_Item(kernel=entry))
            elif stack[-1].kernel is None:
                stack[-1].kernel = entry
    return top


def _chosen(menu: list[_Item], name: str) -> Entry | None:
    """The entry that GRUB boots with this ``default``; None: the entry has no kernel."""
    first, _, submenu = name.replace(">>", "\0").partition(">")
    first, submenu = first.replace("\0", ">"), submenu.replace("\0", ">>")
    item = next((candidate for candidate in menu if first and first in candidate.names), None)
    if item is None and re.fullmatch(r"\d{1,6}", first) and int(first) < len(menu):
        item = menu[int(first)]
    if item is None:
        item, submenu = (menu[0] if menu else _Item()), ""
    return item.kernel if item.menu is None else _chosen(item.menu, submenu)


def _kernels(menu: list[_Item]) -> Iterator[Entry]:
    for item in menu:
        if item.kernel is not None:
            yield item.kernel
        yield from _kernels(item.menu or [])


def _newest_first(path: str) -> list[tuple[int, int, str]]:
    """The key by which entries sort, by their files' names, as rpm compares versions."""
    name = path.rpartition("/")[2]
    parts = re.findall(r"\d+|[A-Za-z]+", name.removesuffix(".conf"))
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in parts]


def _chosen_path(paths: list[str], titles: Mapping[str, str], default: str) -> str:
    """The entry that this default names; else the newest. paths: the newest first"""
    for path in paths:
        stem = path.rpartition("/")[2].removesuffix(".conf")
        named = stem == default or titles.get(path) == default
        if named or (default and fnmatch.fnmatchcase(stem, default.removesuffix(".conf"))):
            return path
    if re.fullmatch(r"\d{1,6}", default) and int(default) < len(paths):
        return paths[int(default)]
    return next((path for path in paths if "-rescue" not in path), paths[0])


def find_next_boot(
    files: Mapping[str, list[Line]], family: str
) -> tuple[Entry | None, tuple[Entry, ...]]:
    """The entry of the next boot, and all further entries, which decide on RHEL's family."""
    variables, env = dict[str, str](), dict[str, str]()
    default, bls = "", False
    menu: list[_Item] = []
    for path, lines in files.items():
        if path.endswith("/grub.cfg"):
            menu = menu if any(_kernels(menu)) else _boot_menu(lines)
            for line in lines:
                name, _, value = line.text.strip().partition("=")
                value = value.strip("\"'")
                bls = bls or name.startswith("blscfg")
                if name == "set default":
                    default = default if value == "${next_entry}" else value
                elif name.startswith("set "):
                    variables.setdefault(name[4:], value)
        elif path in GRUBENV:
            pairs = (line.text.partition("=") for line in lines)
            env.update({name: value for name, _, value in pairs})
        elif path == LOADER_CONF:
            words = [line.text.split(None, 1) for line in lines]
            defaults = [
                pair[1].strip() for pair in words if pair[0] == "default" and len(pair) == 2
            ]
            default = default or (defaults[-1] if defaults else "")
    variables.update(env)
    default = env.get("next_entry", "") or expand(default, env)
    entries, titles = dict[str, Entry](), dict[str, str]()
    for path, lines in files.items():
        for line in lines if path.startswith(f"{ENTRIES}/") else ():
            if line.text.startswith("options") and path not in entries:
                arguments = kernel_arguments(expand(line.text[7:], variables))
                entries[path] = Entry(line.source, arguments)
            elif line.text.startswith("title"):
                titles[path] = line.text[5:].strip()
    kernels = tuple(_kernels(menu))
    if entries and (not kernels or bls or (family == "redhat" and not menu[0].names)):
        paths = sorted(entries, key=_newest_first, reverse=True)
        chosen = _chosen_path(paths, titles, default)
        other_paths = (path for path in paths if path != chosen and "-rescue" not in path)
        return entries[chosen], tuple(entries[path] for path in other_paths)
    return _chosen(menu, default) or next(iter(kernels), None), ()


# --- The probe.

DEFAULT_GRUB = "/etc/default/grub"
GRUB_D = "/etc/default/grub.d"
#: The variable in nodeready's file for GRUB that holds the arguments.
OWN_VARIABLE = "nodeready_args"

#: The scripts that write GRUB's entries from GRUB_CMDLINE_LINUX.
GENERATED = ("10_linux", "10_linux_zfs", "20_linux_xen", "")


def _script(policy: Policy) -> str:
    if policy.iommu_args == ():
        return ":"
    return shell.script(
        "iommu", NR_AMD="1" if policy.iommu_args else "", VENDOR=VENDOR, ENTRIES=ENTRIES,
        GRUB_CFG=" ".join(GRUB_CFG), GRUBENV=" ".join(GRUBENV), LOADER_CONF=LOADER_CONF,
        DEFAULT_GRUB=DEFAULT_GRUB, GRUB_D=GRUB_D,
    )  # fmt: skip


@dataclass(frozen=True)
class Iommu:
    """The facts that decide a node's kernel arguments."""

    JSON_KEYS: ClassVar = {"own_line": "ours"}
    devices: tuple[str, ...] = ()  # PCI device ids of AMD's GPUs (``0x74a1``), sorted
    cpus: int = 0  # logical CPUs online; of 256 and more the kernel finds 255 without an IOMMU
    cpu_vendor: str = ""  # AuthenticAMD, GenuineIntel, or ""
    live: tuple[str, ...] = ()  # the tokens of /proc/cmdline
    boot: tuple[Entry, ...] = ()  # the boot loader's entry of the next boot; () without one
    config: tuple[Line, ...] = ()  # assignments of /etc/default/grub and grub.d/*.cfg, in order
    family: str = ""  # debian, redhat, suse, or "" for another distribution
    tools: tuple[str, ...] = ()  # installed ones of update-grub, grub-mkconfig, grubby, …
    dropins: tuple[str, ...] = ()  # the files of grub.d, in the order of reading
    own_line: Line | None = None  # the line of nodeready's file with the arguments, or None
    generated: bool = False  # grub.cfg was written after nodeready's file
    unreadable: tuple[str, ...] = ()  # boot files that only root may read
    default_grub: bytes | None = None  # the bytes of /etc/default/grub; None: no such file
    entries: tuple[Entry, ...] = ()  # the other boot loader entries


def count_listed(ranges: str) -> int | None:
    """How many numbers a kernel list such as ``0-127,256`` holds; None for another text."""
    count = 0
    for part in ranges.strip().split(","):
        if (match := re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)) is None:
            return None
        count += int(match[2] or match[1]) - int(match[1]) + 1
    return count


def _family(lines: Iterable[Line]) -> str:
    """debian, redhat or suse, from ID and ID_LIKE of os-release(5)."""
    rows = (line.text.partition("=") for line in lines)
    values = {name: value.strip().strip("\"'") for name, _, value in rows}
    words = f"{values.get('ID', '')} {values.get('ID_LIKE', '')}".lower().split()
    families = {
        "debian": "debian|ubuntu", "redhat": "rhel|fedora|centos|rocky|almalinux",
        "suse": "suse|sles|opensuse.*|sle_hpc",
    }  # fmt: skip
    matches = (name for word in words for name, ids in families.items() if re.fullmatch(ids, word))
    return next(matches, "")


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
    if (cpus := count_listed(values["cpus"]) if "cpus" in values else 0) is None:
        raise ProbeError("the list of CPUs makes no sense", values["cpus"])
    return Iommu(
        devices=tuple(sorted(output.all("device"))),
        cpus=cpus,
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
