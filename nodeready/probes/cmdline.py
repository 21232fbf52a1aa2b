"""Kernel command lines: their tokens, and what the lines of GRUB's configuration make of them.

Rules: the kernel splits at white space outside double quotes, takes ``-`` and ``_`` in names for
the same, and leaves what follows ``--`` to init (kernel/params.c,
Documentation/admin-guide/kernel-parameters.rst).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from nodeready.probes.base import Line

#: Options of which several values add up, each on its own: another token does not contradict.
REPEATABLE = frozenset({"pci", "console", "earlycon", "modprobe.blacklist", "rd.driver.blacklist"})
#: The variables that become the command line, in this order (grub-mkconfig's 10_linux).
VARIABLES = ("GRUB_CMDLINE_LINUX", "GRUB_CMDLINE_LINUX_DEFAULT")

_ASSIGNMENT = re.compile(
    rf"\s*(?:export\s+)?({'|'.join(reversed(VARIABLES))})=(.*?)\r?$", re.DOTALL
)
_PIECE = re.compile(r"\"((?:[^\"\\]|\\.)*)\"|'([^']*)'|\\(.)|([^\s\"'\\;&|<>()#`]+)", re.DOTALL)
_REFERENCE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")


def tokens(text: str) -> tuple[str, ...]:
    """The arguments that the kernel sees in a command line, in order, quotes included."""
    found = re.findall(r"(?:[^\s\"]|\"[^\"]*(?:\"|$))+", text)
    return tuple(found[: found.index("--")] if "--" in found else found)


def option(token: str) -> str:
    """The name of the option that a token sets, as the kernel compares it: ``amd_iommu``."""
    return token.partition("=")[0].replace("-", "_")


def same(token: str, other: str) -> bool:
    """Whether two tokens say the same thing."""
    return option(token) == option(other) and token.partition("=")[2] == other.partition("=")[2]


def missing(present: Iterable[str], wanted: Iterable[str]) -> tuple[str, ...]:
    """The wanted tokens that are not there."""
    there = tuple(present)
    return tuple(want for want in wanted if not any(same(token, want) for token in there))


def contradicting(present: Iterable[str], wanted: Iterable[str]) -> tuple[str, ...]:
    """The tokens that set an option of the wanted ones to something else, each once."""
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
    """The value of a shell assignment's right side; None for what only a shell can tell."""
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
    # A backslash at the end goes on in the next line.
    return None if text.rstrip().endswith("\\") else value


class Configured(NamedTuple):
    """What GRUB's configuration files set.

    tokens: of the command line that they make; None when only a shell can tell
    last:   the last line that assigns one of the variables, or None
    """

    tokens: tuple[str, ...] | None
    last: Line | None


def configured(lines: Iterable[Line]) -> Configured:
    """What the assignments of /etc/default/grub and grub.d make, in the order of reading."""
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
