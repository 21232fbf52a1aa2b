"""The one gate from our code to a node's shell: quoting, and the command that carries a script.

A script travels base64-encoded inside a one-line command without quotes, newlines or backslashes
of its own, so that every login shell (bash, dash, fish, csh) hands it on unchanged, whatever
`.bashrc` prints and whatever the script contains. On the node it runs under POSIX sh.
"""

from __future__ import annotations

import base64
import os
import re
import shlex
from functools import cache
from typing import Any

#: Seconds between TERM and KILL for a remote command that ran into its limit.
KILL_AFTER_S = 5
#: Linux refuses a single argument of 128 KiB and more (MAX_ARG_STRLEN).
MAX_SCRIPT_BYTES = 90_000


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


def command(script: str, timeout_s: int, tag: str) -> str:
    """One line that runs ``script`` on a node: under ``timeout -k``, LC_ALL=C, no standard input.

    tag: a word that marks the process on the node (``nodeready:RUN``), so that it can be ended.
    The connection's standard input is the script's file descriptor 3.
    Raises ValueError for what is no tag, and for a script that is too long.
    """
    if not re.fullmatch(r"[A-Za-z0-9:_-]+", tag):
        raise ValueError(f"no tag for a process: {tag!r}")
    text = f"{library('prologue')}nr_main() {{\n{script}\n}}\nnr_main </dev/null\n"
    encoded = base64.b64encode(text.encode("utf-8", "surrogateescape")).decode("ascii")
    if len(encoded) > MAX_SCRIPT_BYTES:
        raise ValueError(f"a script of {len(encoded)} bytes is too long for one command")
    # The trap: `timeout` watches only this shell. If TERM ended it, what ignores TERM would never
    # get its KILL.
    inner = f"trap : TERM; exec 3<&0; echo {encoded}|base64 -d|sh"
    return f"timeout -k {KILL_AFTER_S} {int(timeout_s)} sh -c {quote(inner)} {tag}"
