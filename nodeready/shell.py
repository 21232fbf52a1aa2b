"""The one gate from our code to a node's shell: quoting, and the command that takes a script.

The command is one constant line without newlines or backslashes, so that every login shell (bash,
dash, fish, csh) hands it on unchanged. The script comes over the command's standard input: every
user of the node can read the process list, and what stands in it. On the node the script runs
under POSIX sh.
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
    """``value`` as one word of a POSIX shell, whatever characters it contains.

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


@cache
def library(name: str) -> str:
    """The text of ``nodeready/sh/NAME.sh``, without comments and indentation."""
    path = os.path.join(os.path.dirname(__file__), "sh", f"{name}.sh")
    # From a zip file as well; importlib.resources takes longer to load than a node to answer.
    loader: Any = globals()["__loader__"]
    return minify(loader.get_data(path).decode("utf-8"))


def minify(script: str) -> str:
    """``script`` without comment lines, blank lines and indentation: it travels to every node."""
    lines = (line.strip() for line in script.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("#")) + "\n"


class Command(NamedTuple):
    """A line for a node's login shell, and what the line reads from its standard input."""

    line: str
    stdin: str


def command(script: str, timeout_s: int, tag: str, payload: str | None = None) -> Command:
    """What runs ``script`` on a node: under ``timeout -k``, LC_ALL=C, no standard input.

    tag:     a word that marks the process on the node (``nodeready:RUN``), so that it can be ended
    payload: what the script finds at its file descriptor 3, and what may follow it there; None:
             the script reads nothing

    A script that is cut off on its way is never run: it is one function, and its last line calls
    it. Raises ValueError for what is no tag.
    """
    if not re.fullmatch(r"[A-Za-z0-9:_-]+", tag):
        raise ValueError(f"no tag for a process: {tag!r}")
    made = f"{library('prologue')}nr_main() {{\n{script}\n}}\nnr_main </dev/null\n"
    # The trap: `timeout` watches only this shell. If TERM ended it, what ignores TERM would never
    # get its KILL. The script runs in a process of its own, which has the tag in its arguments.
    if payload is None:
        stdin, inner = made, 'trap : TERM; (eval "$(cat)")'
    else:
        # In front of a payload, the script is one line: `read` takes no byte more than that of a
        # pipe, as other programs do (head of busybox).
        text = base64.b64encode(made.encode("utf-8", "surrogateescape")).decode("ascii")
        stdin = f"{text}\n{payload}"
        inner = 'trap : TERM; exec 3<&0; read -r nr && (eval "$(echo $nr|base64 -d)")'
    return Command(f"timeout -k {KILL_AFTER_S} {int(timeout_s)} sh -c {quote(inner)} {tag}", stdin)
