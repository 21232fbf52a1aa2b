"""The sysctl files of a node, and which of their lines wins at boot.

Rules, from sysctl.d(5) and procps' sysctl(8): files of all directories sort by base name and the
last assignment wins; a file masks the files of its name in later directories of the list (a link
to /dev/null masks all of them). systemd-sysctl does not read /etc/sysctl.conf itself (Debian 12
links it as 99-sysctl.conf); ``sysctl --system`` reads it last of all.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from nodeready.policy import Policy
from nodeready.subjects.base import Line, Output, Section, beatable, by_path, file_lines
from nodeready.subjects.result import Result, ok, warn

#: Highest priority first (sysctl.d(5); procps adds /usr/local/lib).
DIRECTORIES = (
    "/etc/sysctl.d",
    "/run/sysctl.d",
    "/usr/local/lib/sysctl.d",
    "/usr/lib/sysctl.d",
    "/lib/sysctl.d",
)
SYSCTL_CONF = "/etc/sysctl.conf"
#: Characters of a key or a pattern of keys; it is a path below /proc/sys.
_MAX_KEY = 4096


def _script(policy: Policy) -> str:
    globs = " ".join(f"{directory}/*.conf" for directory in DIRECTORIES)
    return rf"""
    for nr_file in {globs} {SYSCTL_CONF}; do
        if [ -e "$nr_file" ] || [ -L "$nr_file" ]; then printf 'file=%s\n' "$nr_file"; fi
    done
    for nr_file in /lib/systemd/systemd-sysctl /usr/lib/systemd/systemd-sysctl; do
        if [ -x "$nr_file" ]; then printf 'reader=systemd\n'; fi
    done
    grep -asHnv -e '^[[:space:]]*[#;]' -e '^[[:space:]]*$' {globs} {SYSCTL_CONF} /dev/null
    :
    """


SECTION = Section("sysctl", _script)


@dataclass(frozen=True)
class Setting:
    """An assignment: the value as written, and its line, ``/path:number``."""

    value: str
    where: str


@dataclass(frozen=True)
class Boot:
    """What sets one key at the next boot.

    winner:    the line that the node's own boot reader takes; None when no line sets the key
    conflict:  the line of /etc/sysctl.conf that `sysctl --system` would take instead, or None
    last_name: base name of the last of other people's files that set the key; "" for none
    """

    winner: Setting | None
    conflict: Setting | None = None
    last_name: str = ""

    @property
    def beatable(self) -> bool:
        """Whether a file of ours in /etc/sysctl.d can win over the winner."""
        if self.winner is None:
            return True
        path = self.winner.where.rpartition(":")[0]
        # Without systemd-sysctl, /etc/sysctl.conf is read behind every directory.
        return path != SYSCTL_CONF and beatable(path.rpartition("/")[2])


@dataclass(frozen=True)
class SysctlFiles:
    """The files in the order in which the boot reader applies them, and their assignments."""

    order: tuple[str, ...]
    lines: Mapping[str, tuple[Line, ...]]
    systemd: bool


def _applied(paths: Iterable[str]) -> list[str]:
    """The unmasked files of the directories, in the order in which they are applied."""
    by_name: dict[str, str] = {}
    for directory in DIRECTORIES:
        for path in paths:
            parent, _, name = path.rpartition("/")
            if parent == directory:
                by_name.setdefault(name, path)
    return [by_name[name] for name in sorted(by_name, key=lambda n: n.encode(errors="replace"))]


@lru_cache(maxsize=64)
def parse(output: Output) -> SysctlFiles:
    """The sysctl files of a node from the section's output. Raises ProbeError.

    One object for all subjects, and for all nodes whose files are alike: a fleet's are.
    """
    text = output.require()
    paths = output.all("file")
    order = _applied(paths)
    if SYSCTL_CONF in paths:
        order.append(SYSCTL_CONF)
    return SysctlFiles(
        tuple(order),
        {path: tuple(lines) for path, lines in by_path(file_lines(text)).items()},
        systemd="reader=systemd" in text.splitlines(),
    )


def _assignment(line: Line, key: str) -> Setting | None:
    """The value that the line gives to ``key`` (``a.b.c``); None for a line of another key."""
    name, equals, value = line.text.partition("=")
    written = name.strip()
    written = written[written.startswith("-") :].lstrip()
    if not equals or len(written.split(maxsplit=1)) != 1 or len(written) > _MAX_KEY:
        return None
    # sysctl.d(5): the first separator of a key decides; behind a slash, dots are literal.
    if "/" in written and ("." not in written or written.index("/") < written.index(".")):
        written = written.replace(".", "\0").replace("/", ".").replace("\0", "/")
    if written == key or ("*" in written and fnmatch.fnmatchcase(key, written)):
        return Setting(value.strip(), line.where)
    return None


def boot_value(files: SysctlFiles, key: str) -> Boot:
    """Which line sets ``key`` at the next boot, for the node's own reader and for procps."""
    winner: Setting | None = None
    conf: Setting | None = None
    last = ""
    for path in files.order:
        for line in files.lines.get(path, ()):
            found = _assignment(line, key)
            if found is None:
                continue
            if path == SYSCTL_CONF:
                conf = found
            else:
                winner = found
                name = path.rpartition("/")[2]
                if "nodeready" not in name and beatable(name):
                    last = name
    if not files.systemd:
        winner = conf or winner
    return Boot(winner, conf if conf != winner else None, last)


def contradicted(check: str, key: str, boot: Boot, wanted: str) -> Result:
    """Judge whether a line of /etc/sysctl.conf gives ``key`` another value than ``wanted``."""
    conflict, expected = boot.conflict, "no conflicting line"
    if conflict is None or conflict.value == wanted:
        return ok(check, expected)
    actual = f"{key} = {conflict.value} wins under sysctl --system"
    return warn(check, expected, actual, conflict.where, f"remove the line {conflict.where}")
