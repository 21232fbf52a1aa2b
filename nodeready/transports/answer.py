"""What came back from a node, and the words for what went wrong on the way. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Seconds for a whole snapshot on a node; each section has its own, smaller limit.
PROBE_TIMEOUT_S = 60
#: Kinds of failure that are not the command's own: no connection was made; it ended in the
#: middle; it stands, but not even the command's own limit was kept; the limit ended the command;
#: sudo wants a password; sudo refuses for good; the node prints without end; a mistake of ours.
UNREACHABLE, LOST, HUNG, TIMEOUT = "unreachable", "lost", "hung", "timeout"
SUDO, REFUSED, OUTPUT, FAILED = "sudo", "refused", "output", "failed"

#: The node's own connection is the trouble: exit status 4.
UNREACHED = frozenset({UNREACHABLE, LOST})
#: After these there is no use in asking the node anything more.
OVER = frozenset({UNREACHABLE, LOST, HUNG, SUDO, REFUSED})


@dataclass(frozen=True)
class Answer:
    """One command's answer from one node.

    ok:    the command ran and exited 0
    error: one line for a person when it did not come to an end of its own; else ""
    kind:  one of the words above beside an error, else ""
    status: the command's exit status; None: a signal ended it
    """

    ok: bool
    stdout: str = ""
    stderr: str = ""
    error: str = ""
    kind: str = ""
    status: int | None = 0

    def reason(self) -> str:
        """Why it failed, in one line: our own script's last word, or the connection's."""
        if self.error:
            return self.error
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        ours = [line for line in lines if line.startswith("nodeready: ")]
        if ours:
            return ours[-1].removeprefix("nodeready: ")
        if lines:
            return lines[-1]
        return "ended by a signal" if self.status is None else f"exit status {self.status}"


def connect_error(
    text: str, address: str, *, user: str, key: str, known_hosts: str, limit_s: int
) -> str:
    """pyinfra's words for a connection that failed, in ours: what, where, what to do.

    address: the host, or ``[host]:port`` as known_hosts files write it
    """
    lowered = text.lower()
    if "host key error" in lowered or "does not match" in lowered:
        return (
            f"host key of {address} changed; refused. If the node was re-imaged: "
            f"ssh-keygen -f {known_hosts} -R {address}"
        )
    if "no host key for" in lowered:
        return f"host key of {address} is not in {known_hosts}; refused (ssh-keyscan adds it)"
    if "authentication" in lowered:
        return f"{address} refused user {user} with {key}"
    if "private key file" in lowered:
        if "is encrypted" in lowered:
            return f"{key} is encrypted: unlock it in an ssh agent"
        return f"{key}: no such key file" if "no such" in lowered else f"{key} is no private key"
    if "could not resolve" in lowered or "name or service not known" in lowered:
        return f"host name {address} does not resolve"
    for pattern, words in (
        (r"banner", "accepts connections but sends no SSH banner"),
        (r"during the handshake", f"stopped during the SSH handshake, within {limit_s} s"),
        (r"connection refused", "connection refused: is sshd running?"),
        (r"no route to host|unreachable", "no route to the node"),
        (r"timed? ?out", f"no answer in {limit_s} s"),
        (r"reset by peer|eof", "the node closed the connection"),
    ):
        if re.search(pattern, lowered):
            return f"{address}: {words}"
    return f"{address}: {text}"


def sudo_error(stderr: str) -> tuple[str, str]:
    """What sudo's own words (in English) mean, and their kind; "" twice when it has not refused.

    Its warnings (``unable to resolve host``) are none of these: the command ran.
    """
    for line in stderr.splitlines():
        ours = re.match(r"sudo(-rs)?: ", line)
        if ours and re.search(r"(password|interactive authentication) is required", line):
            return "sudo wants a password: run on a terminal to be asked, or allow NOPASSWD", SUDO
        if re.search(
            r"^sudo(-rs)?: .*(incorrect (password|authentication)|no password was)", line
        ):
            return "sudo refused the password", REFUSED
        if re.search(r" is not (in the sudoers file|allowed to )|may not run sudo", line):
            return f"sudo: {line.strip()}", REFUSED
        if re.search(r"^env: .*sudo.*No such file|^sh: .*sudo: not found", line):
            return "sudo is not installed", REFUSED
        if ours and re.search(r"must have a tty|terminal is required", line):
            return line.strip(), REFUSED
    return "", ""
