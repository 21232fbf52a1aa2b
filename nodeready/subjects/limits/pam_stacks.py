"""Whether logins get the limits at all: pam_limits in the PAM stacks, and sshd's UsePAM.

Rules, from pam.conf(5), pam_limits(8) and sshd_config(5): the first of the PAM directories with a
file of the service's name has its stack. ``@include`` includes another file's lines of all kinds,
``include`` and ``substack`` its lines of the same kind. With ``conf=`` pam_limits reads only that
file. Sshd uses the first of several values of a keyword; without a value it does not use PAM.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from nodeready.core.base import PAM_DIRECTORIES, Line

#: The services that open sessions of jobs and people; RHEL has a separate stack for ``su -``.
SERVICES = ("sshd", "su", "su-l")
PAM_INCLUDED = (
    "common-session", "common-session-noninteractive", "common-session-pc", "common-auth",
    "common-account", "common-password", "system-auth", "password-auth", "postlogin",
    "system-login", "system-remote-login", "base-session",
)  # fmt: skip
SSHD_CONFIG = ("/etc/ssh/sshd_config", "/usr/etc/ssh/sshd_config")
SSHD_INCLUDED = ("/etc/ssh/sshd_config.d/*.conf", "/usr/etc/ssh/sshd_config.d/*.conf")
_PAM_LINE = re.compile(r"-?(\w+)\s+(\[[^]]*\]|\S+)\s+(\S+)\s*(.*)")
#: Maximum depth of included files.
_MAX_DEPTH = 8


@dataclass(frozen=True)
class PamStack:
    """The calls of pam_limits in a service's PAM stack."""

    JSON_KEYS: ClassVar = {"is_complete": "whole"}

    path: str  # the service's file
    limits: tuple[Line, ...] = ()  # the lines of its session stack that call pam_limits, in order
    is_complete: bool = True  # all files that the stack names were read

    @property
    def conf(self) -> str:
        """The only file that pam_limits reads, by ``conf=``; "": the system's files."""
        match = re.search(r"\sconf=(\S+)", self.limits[-1].text) if self.limits else None
        return match[1] if match else ""


def parse_stack(service: str, files: Mapping[str, list[Line]], depth: int = 0) -> PamStack | None:
    """The stack of a service; None when no file of its name was read."""
    paths = (f"{directory}/{service}" for directory in PAM_DIRECTORIES)
    path = next((path for path in paths if path in files), "")
    if not path or depth > _MAX_DEPTH:
        return None
    limit_lines: list[Line] = []
    is_complete = True
    for line in files[path]:
        text = line.text.partition("#")[0].strip()
        include = re.fullmatch(r"@include\s+(\S+)", text)
        match = _PAM_LINE.fullmatch(text)
        included = include[1] if include else ""
        if match and match[1].lower() == "session":
            if match[2] in ("include", "substack"):
                included = match[3]
            elif match[3].rpartition("/")[2] == "pam_limits.so":
                limit_lines.append(line)
        if included:
            inner = parse_stack(included.rpartition("/")[2], files, depth + 1)
            limit_lines.extend(inner.limits if inner else ())
            is_complete = is_complete and inner is not None and inner.is_complete
    return PamStack(path, tuple(limit_lines), is_complete)


#: The patterns of ``Include`` whose files were read.
_READ = {word for path in SSHD_INCLUDED for word in (path, path.removeprefix("/etc/ssh/"))}


def find_disabled_pam(files: Mapping[str, list[Line]]) -> Line | str | None:
    """The line of sshd's configuration that switches PAM off.

    A path: neither that file nor an included file switches PAM on. None: PAM is on, or no
    configuration was read.
    """
    main = next((path for path in SSHD_CONFIG if path in files), "")
    for line in _sshd_lines(main, files, 0):
        words = line.text.lower().replace("=", " ", 1).split()
        if words[:1] == ["include"] and not {word.strip('"') for word in words[1:]} <= _READ:
            # A file that was not read may have an earlier line.
            return None
        match = re.fullmatch(r"usepam[\s=]+\"?(\w+)\"?\s*", line.text.strip(), re.I)
        if match:
            return line if match[1].lower() == "no" else None
    return main or None


def _sshd_lines(path: str, files: Mapping[str, list[Line]], depth: int) -> Iterator[Line]:
    """The lines of sshd's configuration for all connections, in order."""
    for line in files.get(path, ()) if depth <= _MAX_DEPTH else ():
        words = line.text.replace("=", " ", 1).split()
        keyword = words[0].lower() if words else ""
        if keyword == "match":
            return
        if keyword == "include":
            for pattern in words[1:]:
                # An absolute pattern replaces the directory.
                path_pattern = posixpath.join("/etc/ssh", pattern.strip('"'))
                for included in fnmatch.filter(sorted(files), path_pattern):
                    yield from _sshd_lines(included, files, depth + 1)
        yield line
