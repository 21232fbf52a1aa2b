"""Quoting for a POSIX shell, and the only command by which nodeready runs a script on a node.

The command is one constant line without newlines or backslashes, so that every login shell (bash,
dash, fish, csh) passes it on unchanged. The script comes over the command's standard input,
because every user of the node can read a command line in the process list. On the node the script
runs under POSIX sh.
"""

from __future__ import annotations

import base64
import os
import re
import shlex
from functools import cache
from typing import Any, NamedTuple

#: Seconds between TERM and KILL for a remote command that ran into its limit.
KILL_AFTER_S = 5


def quote(value: object) -> str:
    """``value`` as one word of a POSIX shell, with any characters.

    Raises ValueError for a NUL byte, which no argument can contain.
    """
    text = str(value)
    if "\0" in text:
        raise ValueError("a shell word cannot contain a NUL byte")
    quoted = shlex.quote(text)
    # zsh makes the path of a command of a bare =word (zshexpn, "= expansion").
    return f"'{text}'" if quoted == text and text.startswith("=") else quoted


def join(words: list[str] | tuple[str, ...]) -> str:
    """``words`` as one shell command, each word quoted."""
    return " ".join(quote(word) for word in words)


def search_path(path: str) -> str:
    """The absolute directories of a ``$PATH``; the system's path without any.

    An empty or relative one means the current directory, which any user may own.
    """
    return (
        ":".join(directory for directory in path.split(":") if directory.startswith("/"))
        or os.defpath
    )


@cache
def library(name: str) -> str:
    """The text of ``nodeready/sh/NAME.sh``, without comments and indentation."""
    path = os.path.join(os.path.dirname(os.path.dirname(__file__)), "sh", f"{name}.sh")
    # The loader also reads from a zip file, and importlib.resources takes longer to import than a
    # node takes to answer.
    loader: Any = globals()["__loader__"]
    return minify(loader.get_data(path).decode("utf-8"))


def minify(script: str) -> str:
    """``script`` without comment lines, blank lines and indentation: it travels to every node."""
    lines = (line.strip() for line in script.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("#")) + "\n"


class ShellCommand(NamedTuple):
    """A line for a node's login shell, and what the line reads from its standard input."""

    line: str
    stdin: str


def command(script: str, timeout_s: int, tag: str, payload: str | None = None) -> ShellCommand:
    """The command that runs ``script`` on a node: under ``timeout -k``, LC_ALL=C, without input.

    tag:     a word that marks the process on the node (``nodeready:RUN``), so that a later command
             can end the process
    payload: the script's input at file descriptor 3, which more input may follow; None: no input

    A script that is cut off on its way is never run: the script is one function, which its last
    line calls. Raises ValueError for a ``tag`` that is no such word.
    """
    if not re.fullmatch(r"[A-Za-z0-9:_-]+", tag):
        raise ValueError(f"no tag for a process: {tag!r}")
    program = f"{library('prologue')}nr_main() {{\n{script}\n}}\nnr_main </dev/null\n"
    # The trap: `timeout` watches only this shell. If TERM ended the shell, a program of the script
    # that ignores TERM would never get its KILL. The script runs in a subshell, which has the tag
    # in its arguments.
    if payload is None:
        stdin, inner = program, 'trap : TERM; (eval "$(cat)")'
    else:
        # In front of a payload, the script is one line: `read` takes that line from a pipe and no
        # byte more, where other programs take what they can (head of busybox).
        text = base64.b64encode(program.encode("utf-8", "surrogateescape")).decode("ascii")
        stdin = f"{text}\n{payload}"
        inner = 'trap : TERM; exec 3<&0; read -r nr && (eval "$(echo $nr|base64 -d)")'
    return ShellCommand(
        f"timeout -k {KILL_AFTER_S} {int(timeout_s)} sh -c {quote(inner)} {tag}", stdin
    )
