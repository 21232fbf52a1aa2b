"""Why ssh does not log in, by what it says: the causes, their words and what repairs them."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """One cause.

    key:     its name, in `nodeready.proofs.reach.Trouble`
    pattern: what ssh says then; "": it is told by something else than ssh's words
    words:   what is wrong; ``{user}`` is the job's user, ``{said}`` what ssh said
    fix:     what a person does about it
    deploy:  a deploy of the subject ssh_client repairs it
    """

    key: str
    pattern: str
    words: str
    fix: str = ""
    deploy: bool = False


#: The first whose pattern is found counts: what ends a login is often the consequence of a line
#: before it. Patterns and words: OpenSSH 7 to 10 (sshconnect.c, sshconnect2.c, readconf.c).
_ALL = (
    Cause(
        "changed_key",
        r"HOST IDENTIFICATION HAS CHANGED|Host key for .* has changed|Offending key for IP in ",
        "the host key is not the one that is known",
        deploy=True,
    ),
    Cause(
        "revoked_key",
        r"REVOKED HOST KEY|is marked as revoked",
        "the host key is revoked",
        "give the host a new key, or take the @revoked line out of known_hosts",
    ),
    Cause(
        "unknown_key",
        r"Host key verification failed|host key is known for",
        "the host key is unknown, so ssh would ask",
        deploy=True,
    ),
    Cause(
        "config",
        r"Bad owner or permissions on|[Bb]ad configuration option|terminating, \d+ bad",
        "ssh does not accept its configuration ({said})",
        "correct the file that ssh names",
    ),
    Cause(
        "open_key",
        r"Permissions \d+ for .* are too open|UNPROTECTED PRIVATE KEY",
        "a private key that others may read is not used ({said})",
        "chmod 600 the private key",
    ),
    Cause(
        "slurm",
        r"pam_slurm_adopt|[Aa]ccess denied by pam_slurm",
        "pam_slurm_adopt lets only the user of a running job in",
        "name as job_user somebody who may log in to nodes without a job, or --skip proof.ssh",
    ),
    Cause(
        "nologin",
        r"pam_nologin|System is (booting up|going down)|Unprivileged users are not permitted",
        "logins are closed (pam_nologin)",
        "remove /run/nologin and /etc/nologin there when their reason is over",
    ),
    Cause(
        "expired",
        r"account has expired|[Pp]assword (has )?expired|[Pp]assword change required",
        "the account or the password of {user} has expired",
        "chage -l {user} there",
    ),
    Cause(
        "denied",
        r"Permission denied|Too many authentication failures",
        "no key of {user} is accepted",
        "put the public key of {user} into ~/.ssh/authorized_keys there, with a home directory "
        "that only {user} may write to",
    ),
    Cause(
        "resolve",
        r"Could not resolve hostname",
        "the name does not resolve",
        "make the name known, in the DNS or in /etc/hosts",
    ),
    Cause(
        "refused",
        r"Connection refused",
        "connection refused",
        "start sshd there; a firewall that rejects says the same",
    ),
    Cause(
        "no_route",
        r"No route to host|Network is unreachable|Host is down",
        "no route ({said})",
        "correct routes, interfaces or the firewall between the nodes",
    ),
    Cause(
        "silent",
        r"timed out during banner exchange",
        "sshd takes the connection and says nothing",
        "restart sshd there: it is stopped, stuck or overloaded",
    ),
    Cause(
        "timeout",
        r"timed out",
        "timed out",
        "look for a firewall that drops, a wrong address, or a node or home directory that hangs",
    ),
    Cause(
        "algorithms",
        r"Unable to negotiate",
        "no algorithm in common ({said})",
        "give both ends the same crypto policy",
    ),
    Cause(
        "closed",
        r"Connection (closed|reset)|closed by remote host",
        "sshd closes the connection",
        "read sshd's log there: MaxStartups, AllowUsers, PAM or a host key that is missing",
    ),
    Cause(
        "shell",
        "",
        "the login runs no command ({said})",
        "try `ssh NAME true` as {user}: the login shell, its start-up files, a forced command",
    ),
    Cause(
        "other_host",
        "",
        "{said} answers",
        "correct the address of the name, in the DNS, /etc/hosts or ~/.ssh/config",
    ),
    Cause(
        "namesake",
        "",
        "nobody can tell them apart",
        "give every node a host name of its own (hostnamectl set-hostname)",
    ),
    Cause(
        "other",
        "",
        "{said}",
        "try `ssh -v NAME true` as {user}",
    ),
)

CAUSES: dict[str, Cause] = {cause.key: cause for cause in _ALL}

_OFFENDING = re.compile(r"Offending (?:\S+ )?key (?:for IP )?in ([^\s:]+:\d+)")


def cause_of(said: str) -> tuple[str, str]:
    """The key of the cause that ssh's words tell, and the line that tells it.

    "other" and ssh's last line when no known cause is among them.
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for cause in _ALL:
        for line in lines if cause.pattern else ():
            if re.search(cause.pattern, line):
                return cause.key, next(filter(offending, lines), line)
    return "other", lines[-1] if lines else "ssh says nothing"


def offending(said: str) -> str:
    """``FILE:LINE`` of the known host key that ssh says is another; "" when it does not say."""
    found = _OFFENDING.search(said)
    return found[1] if found else ""
