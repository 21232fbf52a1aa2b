"""Where kernel.core_pattern sends the core of a process: core(5), "Naming of core dump files"."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping

#: Stands for what only the kernel knows: a number in an outer namespace, the CPU.
UNKNOWN = "\0"
#: All specifiers of Linux 6.16; the kernel drops any other one.
SPECIFIERS = frozenset("cCdeEFghiIpPstu")
# The kernel keeps a value of these from leading into another directory.
_NAMES = frozenset("eEh")


def program(pattern: str) -> str:
    """The program that a pattern pipes to, or the socket (``@``); "": it names a file."""
    if pattern.startswith("@"):
        return pattern.split(maxsplit=1)[0]
    words = pattern[1:].split() if pattern.startswith("|") else []
    # A relative program is looked up from /, where the kernel starts it.
    return f"/{words[0].lstrip('/')}" if words else "|" if pattern.startswith("|") else ""


def expand(pattern: str, values: Mapping[str, str], *, uses_pid: bool = False) -> str:
    """The path of a core, with UNKNOWN for each specifier that has no value.

    uses_pid: kernel.core_uses_pid, which counts when there is no %p
    """

    def one(match: re.Match[str]) -> str:
        letter = match[1]
        if letter == "%":
            return "%"
        value = values.get(letter, UNKNOWN if letter in SPECIFIERS else "")
        return _harmless(value) if letter in _NAMES else value

    path = re.sub(r"%(.?)", one, pattern, flags=re.S)
    # "%%p" is no %p.
    if uses_pid and "p" not in re.findall(r"%(.)", pattern, re.S):
        path += f".{values.get('p', UNKNOWN)}"
    return path


def _harmless(value: str) -> str:
    value = value.replace("/", "!")
    return "!" if value == "" else f"!{value[1:]}" if value in (".", "..") else value


def shown(path: str) -> str:
    """An expanded path for people: ``*`` for what is unknown, bytes that are no text replaced."""
    text = path.replace(UNKNOWN, "*")
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def names_process(pattern: str, values: Mapping[str, str], *, uses_pid: bool = False) -> bool:
    """Whether the path contains a number of the process that is known here."""
    letters = {*re.findall(r"%(.)", pattern, re.S), *("p" if uses_pid else "")}
    return bool(letters & {"p", "P", "i", "I"} & set(values))


def existing(path: str) -> Iterator[str]:
    """The files whose paths an expanded path can stand for."""
    if UNKNOWN not in path:
        # No listing: a core directory may let users write and not read.
        if os.path.lexists(path):
            yield path
        return
    pieces = path.split(UNKNOWN)
    exact = re.compile(r"[0-9]*".join(map(re.escape, pieces)), re.S)
    for found in glob.iglob("*".join(map(glob.escape, pieces))):
        if exact.fullmatch(found):
            yield found
