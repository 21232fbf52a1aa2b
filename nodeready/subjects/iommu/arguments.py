"""Kernel command lines: their tokens, and how GRUB's configuration files make one.

Rules: the kernel splits at white space outside double quotes, treats ``-`` and ``_`` in names as
equal, and leaves the words after ``--`` to init (kernel/params.c,
Documentation/admin-guide/kernel-parameters.rst).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from nodeready.core.base import Line, kernel_arguments

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
    value = ""
    at = 0
    while at < len(text) and not text[at].isspace() and text[at] not in ";#":
        match = _PIECE.match(text, at)
        if match is None:
            return None
        double, single, escaped, bare = match.groups()
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
        at = match.end()
    # After a backslash at the end, the assignment continues in the next line.
    return None if text.rstrip().endswith("\\") else value


class Configured(NamedTuple):
    """The kernel arguments in GRUB's configuration files."""

    # of the resulting command line; None where only a shell can expand it
    tokens: tuple[str, ...] | None
    last: Line | None  # the last line that assigns one of the variables, or None


def configured(lines: Iterable[Line]) -> Configured:
    """The arguments that /etc/default/grub and grub.d set; ``lines`` in the order of reading."""
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
    tokens: list[str] = []
    for variable in VARIABLES:
        tokens.extend(kernel_arguments(values.get(variable, "")))
    return Configured(tuple(tokens) if readable else None, last)
