"""Quoting for a POSIX shell, and the only command by which nodeready runs a script on a node.

The command is one constant line without newlines or backslashes, so that every login shell (bash,
dash, fish, csh) passes it on unchanged. The script comes over the command's standard input,
because every user of the node can read a command line in the process list. On the node the script
runs under POSIX sh.
"""

from __future__ import annotations

import binascii
import os
import re
import shlex
from collections.abc import Iterable
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


def search_path(path: str | None = None) -> str:
    """The absolute directories of a path, by default ``$PATH``; without any, the system's path.

    An empty or relative directory depends on the current one, which any user may own.
    """
    path = os.environ.get("PATH", "") if path is None else path
    directories = [directory for directory in path.split(":") if directory.startswith("/")]
    return ":".join(directories) or os.defpath


def find_program(name: str) -> str | None:
    """Where a program is in our `search_path`; None: nowhere."""
    from shutil import which

    return which(name, path=search_path())


@cache
def library(name: str) -> str:
    """The text of ``nodeready/sh/NAME.sh``, without comments and indentation."""
    path = os.path.join(os.path.dirname(os.path.dirname(__file__)), "sh", f"{name}.sh")
    # Reads from a zip file, too; to import importlib.resources takes longer than a node's answer.
    loader: Any = globals()["__loader__"]
    return minify(loader.get_data(path).decode("utf-8"))


def script(name: str, **values: object) -> str:
    """The text of a `library`, where a word @KEY@ stands for the value of this key."""
    return re.sub("@([A-Z_]+)@", lambda match: str(values[match[1]]), library(name))


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
        data = program.encode("utf-8", "surrogateescape")
        text = binascii.b2a_base64(data, newline=False).decode("ascii")
        stdin = f"{text}\n{payload}"
        inner = 'trap : TERM; exec 3<&0; read -r nr && (eval "$(echo $nr|base64 -d)")'
    line = f"timeout -k {KILL_AFTER_S} {int(timeout_s)} sh -c {quote(inner)} {tag}"
    return ShellCommand(line, stdin)


# --- The Pythons of a node: which of them is new enough for nodeready's programs there.

#: Where a Python of 3.9 or newer may be: the platform's own interpreter is often older. Every
#: program on a node is started by the first of these that is new enough.
PYTHONS = (
    "python3", "python3.13", "python3.12", "python3.11", "python3.10", "python3.9",
    "/usr/libexec/platform-python",
)  # fmt: skip
OLDEST = (3, 9)
#: Package manager -> the package of a newer Python beside the distribution's own: in RHEL 8 (3.6),
#: in Ubuntu 20.04 (3.8), in SLES 15 (3.6).
PACKAGES = {
    "apt-get": "python3.9", "zypper": "python311", "dnf": "python3.11", "yum": "python3.11",
}  # fmt: skip

#: Version -> the magic number of its compiled code, which a release never changes
#: (Lib/importlib/_bootstrap_external.py of CPython).
MAGICS = {
    "3.9": "610d0d0a", "3.10": "6f0d0d0a", "3.11": "a70d0d0a", "3.12": "cb0d0d0a",
    "3.13": "f30d0d0a", "3.14": "2b0e0d0a",
}  # fmt: skip

# A Python that is new enough also prints the magic number of its compiled code.
_ABOUT = (
    'import sys; new = sys.version_info >= (3, 9); print("%d.%d" % sys.version_info[:2], '
    '*([__import__("_frozen_importlib_external").MAGIC_NUMBER.hex()] if new else []))'
)
_RELEASES = " ".join(f"'{version} {magic}'" for version, magic in MAGICS.items())
#: Prints ``python=NAME VERSION [MAGIC]`` for each Python, up to the first that is new enough. The
#: sections in one shell share its answer. A start costs as much as ten other processes: a release
#: beside which the same file has its version in its name, and that has the module without which no
#: Python starts, is not started.
SCRIPT = rf"""
    if [ -z "${{nr_pythons:-}}" ]; then
        for nr_name in {" ".join(PYTHONS)}; do
            if ! command -v "$nr_name" >/dev/null 2>&1; then continue; fi
            IFS=:
            for nr_dir in $PATH; do
                if [ -x "$nr_dir/$nr_name" ]; then break; fi
            done
            unset IFS
            nr_said=
            for nr_known in {_RELEASES}; do
                nr_file=$nr_dir/python${{nr_known% *}}
                if [ -s "$nr_file" ] && [ "$nr_file" -ef "$nr_dir/$nr_name" ]; then
                    nr_said=$nr_known
                fi
            done
            for nr_file in "${{nr_dir%/*}}"/lib*/python"${{nr_said% *}}"/encodings/__init__.py; do
                if [ ! -s "$nr_file" ]; then nr_said=; fi
            done
            if [ -z "$nr_said" ]; then nr_said=$("$nr_name" -ISBc '{_ABOUT}' 2>/dev/null); fi
            nr_said=${{nr_said%%
*}}
            nr_pythons="${{nr_pythons:-}}python=$nr_name ${{nr_said:-?}}
"
            case $nr_said in *' '*) break ;; esac
        done
    fi
    printf '%s' "${{nr_pythons:-}}"
"""


class NodePython(NamedTuple):
    """The Python for nodeready's programs."""

    name: str = ""  # as one of PYTHONS; "": there is none
    old: str = ""  # without a new enough Python: the first one, with its version; "": none at all
    magic: str = ""  # the magic number of its compiled code; "": unknown


def parse_pythons(rows: Iterable[str]) -> NodePython:
    """The Python of the rows, without ``python=``."""
    old = ""
    for row in rows:
        name, _, answer = row.partition(" ")
        version, _, magic = answer.partition(" ")
        match = re.fullmatch(r"(\d{1,3})\.(\d{1,3})", version)
        if name in PYTHONS and match and (int(match[1]), int(match[2])) >= OLDEST:
            return NodePython(name, "", magic if re.fullmatch(r"[0-9a-f]{8}", magic) else "")
        old = old or (f"{name} is {version}" if match else f"{name} does not run")
    return NodePython(old=old)
