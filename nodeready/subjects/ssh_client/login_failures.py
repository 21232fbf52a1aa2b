"""Why ssh does not log in: the causes behind its messages, and their fixes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nodeready import knowledge

#: ``FILE: line N: Bad configuration option`` and ``FILE line N: unsupported option``.
AT_LINE = re.compile(r"(/[^\s:]+):? line (\d+):")
OF_FILE = re.compile(r"(?:Bad owner or permissions on|Can't open user config file) (/[^\s:]+)")


@dataclass(frozen=True)
class LoginCause:
    """One cause: a row of knowledge/login_failures.toml."""

    key: str  # the cause's name, in `nodeready.subjects.proof.peer_facts.Trouble`
    words: str  # the fault; ``{user}`` is the job's user, ``{said}`` ssh's message
    source: str  # where this is documented
    pattern: str = ""  # matches ssh's message; "": the cause is not found by a message
    fix: str = ""  # the repair by a person; ``{file}`` is the file that the message names
    deploy: bool = False  # a deploy of the subject ssh_client repairs the cause


#: Key -> the cause. The first in this order whose pattern matches a message counts.
CAUSES: dict[str, LoginCause] = {
    key: LoginCause(key, **row) for key, row in knowledge.rows("login_failures").items()
}

_OFFENDING = re.compile(r"Offending (?:\S+ )?key (?:for IP )?in ([^\s:]+:\d+)")
#: Messages of ssh that name no cause.
_NOISE = re.compile(
    r"Warning: Permanently added|debug\d: |(kex|ssh)_exchange_identification: |[@*# ]+$|"
    r"Connection (to|closed|reset)|(Connection|Disconnected|Received disconnect) "
)
_NAMED = re.compile(r"(?:^|[\s'\"])(/[^\s'\":]+)")


def cause_of(messages: str) -> tuple[str, str]:
    """The key of the cause in ssh's messages, and the line to show for it.

    Without a known cause: "other" and ssh's last line.
    """
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    for cause in CAUSES.values():
        for index, line in enumerate(lines if cause.pattern else ()):
            if re.search(cause.pattern, line):
                return cause.key, _line_to_show(cause.key, lines, index)
    return "other", lines[-1] if lines else "ssh says nothing"


def _line_to_show(key: str, lines: list[str], index: int) -> str:
    """The line with the reason. index: of the line that matched the cause

    If the matching line only reports the end of ssh, an earlier line has the reason: the message
    of a ProxyCommand, a line of the configuration, or the text of /etc/nologin.
    """
    if key == "changed_key":
        return next(filter(offending, lines), lines[index])
    if key == "open_key":
        return next((line for line in lines if line.startswith("Permissions ")), lines[index])
    before = [line for line in lines[:index] if not _NOISE.match(line)]
    if key == "config" and "terminating" in lines[index]:
        return before[-1] if before else lines[index]
    if key in ("proxy", "closed", "startups"):
        return before[0] if before else lines[index]
    return lines[index]


def named_file(messages: str) -> str:
    """The first path in ssh's messages, or words that stand for it."""
    match = _NAMED.search(messages)
    return match[1] if match else "the file that ssh names"


def offending(messages: str) -> str:
    """``FILE:LINE`` of the known host key that ssh's message names as offending, or ""."""
    match = _OFFENDING.search(messages)
    return match[1] if match else ""


def message_source(messages: str) -> str:
    """What ssh's message names: ``FILE:LINE`` of a key or a setting, or a file; "": nothing."""
    line, file = AT_LINE.search(messages), OF_FILE.search(messages)
    return offending(messages) or (f"{line[1]}:{line[2]}" if line else file[1] if file else "")
