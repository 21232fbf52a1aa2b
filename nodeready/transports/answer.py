"""What came back from a node, and the words for what went wrong on the way. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Kinds of failure that are the connection's, not the command's.
UNREACHABLE, LOST, TIMEOUT, SUDO = "unreachable", "lost", "timeout", "sudo"


@dataclass(frozen=True)
class Answer:
    """One command's answer from one node.

    ok:    the command ran and exited 0
    error: one line for a person when the connection failed; "" when the command itself ran
    kind:  UNREACHABLE, LOST, TIMEOUT or SUDO beside an error, else ""
    """

    ok: bool
    stdout: str = ""
    stderr: str = ""
    error: str = ""
    kind: str = ""

    def reason(self) -> str:
        """Why it failed, in one line: our own script's last word, or the connection's."""
        if self.error:
            return self.error
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        ours = [line for line in lines if line.startswith("nodeready: ")]
        if ours:
            return ours[-1].removeprefix("nodeready: ")
        return lines[-1] if lines else "failed without a word"


def connect_error(text: str, address: str, user: str, key: str, known_hosts: str) -> str:
    """pyinfra's words for a connection that failed, in ours: what, where, what to do."""
    lowered = text.lower()
    if "host key error" in lowered or "does not match" in lowered:
        return (
            f"host key of {address} changed; refused. If the node was re-imaged: "
            f"ssh-keygen -f {known_hosts} -R {address}"
        )
    if "no host key for" in lowered:
        return f"host key of {address} is not in {known_hosts}; refused (ssh-keyscan adds it)"
    if "authentication" in lowered or "no authentication methods" in lowered:
        return f"{address} refused user {user} with {key}"
    if "private key file is encrypted" in lowered:
        return f"{key} is encrypted: unlock it in an ssh agent"
    if "no such file" in lowered and "key" in lowered:
        return f"{key}: no such key file"
    if "could not resolve" in lowered or "name or service not known" in lowered:
        return f"host name {address} does not resolve"
    if "banner" in lowered:
        return f"{address} accepts connections but sends no SSH banner"
    for pattern, words in (
        (r"connection refused|unable to connect", "connection refused: is sshd running?"),
        (r"no route to host|unreachable", "no route to the node"),
        (r"timed? ?out", "no answer in time"),
        (r"reset by peer|eof", "the node closed the connection"),
    ):
        if re.search(pattern, lowered):
            return f"{address}: {words}"
    return f"{address}: {text}"
