"""Why ssh does not log in: the causes behind its messages, and their fixes."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: ``FILE: line N: Bad configuration option`` and ``FILE line N: unsupported option``.
AT_LINE = re.compile(r"(/[^\s:]+):? line (\d+):")
OF_FILE = re.compile(r"(?:Bad owner or permissions on|Can't open user config file) (/[^\s:]+)")


@dataclass(frozen=True)
class LoginCause:
    """One cause."""

    key: str  # the cause's name, in `nodeready.subjects.proof.peer_facts.Trouble`
    pattern: str  # matches ssh's message; "": the cause is not found by a message
    words: str  # the fault; ``{user}`` is the job's user, ``{said}`` ssh's message
    fix: str = ""  # the repair by a person; ``{file}`` is the file that the message names
    deploy: bool = False  # a deploy of the subject ssh_client repairs the cause


#: The first cause in this order whose pattern matches a message counts, because the last message
#: of a login is often the consequence of an earlier one. Patterns: OpenSSH 7 to 10 (sshconnect.c,
#: sshconnect2.c, readconf.c).
_ORDERED_CAUSES = (
    # A connection through a command has no address (packet.c, ssh_remote_ipaddr).
    LoginCause("proxy", r"UNKNOWN port 65535|[Ss]tdio forwarding failed",
        "the ProxyCommand or ProxyJump of the ssh configuration fails ({said})",
        "correct or remove that line: ssh -G NAME, as {user}, shows it; it stands in "
        "~/.ssh/config or /etc/ssh/ssh_config"),
    LoginCause("changed_key",
        r"HOST IDENTIFICATION HAS CHANGED|Host key for .* has changed|Offending key for IP in ",
        "the host key is not the one that is known", deploy=True),
    LoginCause("revoked_key",
        r"REVOKED HOST KEY|is marked as revoked|revoked by file|in revoked keys file",
        "the host key is revoked",
        "give the host a new key, or take the @revoked line out of known_hosts and the key out of "
        "the file RevokedHostKeys"),
    LoginCause("unknown_key", r"Host key verification failed|host key is known for",
        "the host key is unknown, so ssh would ask", deploy=True),
    LoginCause("config_owner", r"Bad owner or permissions on",
        "ssh refuses a configuration that others could have written ({said})",
        "chown {user} {file}; chmod go-w {file} (below /etc: chown root)"),
    LoginCause("config_closed", r"Can't open user config file",
        "ssh may not read its configuration ({said})",
        "let {user} read {file}: chmod a+r"),
    LoginCause("config", r"[Bb]ad configuration option|terminating, \d+ bad",
        "ssh does not accept its configuration ({said})",
        "correct the line that ssh names"),
    LoginCause("remote_command", r"Cannot execute command-line and remote command",
        "RemoteCommand in the ssh configuration leaves no room for a command",
        "remove that line: ssh -G NAME, as {user}, shows it"),
    # "ssh:" in front: a peer's login shell prints the same message about its libraries.
    LoginCause("library",
        r"^(\S*/)?ssh: (error while loading shared libraries|(symbol lookup|relocation) error)",
        "ssh does not start ({said})", deploy=True),
    LoginCause("open_key", r"Permissions \d+ for .* are too open|UNPROTECTED PRIVATE KEY",
        "a private key that others may read is not used ({said})",
        "chmod 600 {file}"),
    LoginCause("no_key", r"no such identity:",
        "the private key of the ssh configuration is not there ({said})",
        "correct IdentityFile in ~/.ssh/config of {user}, or make {file}"),
    LoginCause("unusable_key", r"Load key .*: |sign_and_send_pubkey: |agent refused operation",
        "a private key cannot be used ({said})",
        "look at {file}: its owner is {user}, its mode 600, and it is a key without a passphrase "
        "or in an agent"),
    LoginCause("slurm", r"pam_slurm_adopt|[Aa]ccess denied by pam_slurm",
        "pam_slurm_adopt lets only the user of a running job in",
        "name as job_user somebody who may log in to nodes without a job, or --skip proof.ssh"),
    LoginCause("nologin",
        r"pam_nologin|System is (booting up|going down)|Unprivileged users are not permitted",
        "logins are closed (pam_nologin)",
        "remove /run/nologin and /etc/nologin there when their reason is over"),
    LoginCause("password", r"[Pp]assword (has )?expired|[Pp]assword change required|"
        r"(must|required to) change your password",
        "the password of {user} has expired ({said})",
        "passwd {user} there; for an account that logs in by keys alone: "
        "chage -M -1 -d -1 {user}"),
    LoginCause("expired", r"account has expired", "the account of {user} has expired",
        "chage -E -1 {user} there, or prolong it in the directory service"),
    LoginCause("too_many_keys", r"Too many authentication failures",
        "sshd hangs up before the right key of {user} is tried (MaxAuthTries)",
        "IdentitiesOnly yes and the right IdentityFile in ~/.ssh/config of {user}, or fewer keys "
        "in the agent"),
    LoginCause("denied", r"Permission denied \(|Permission denied, please try again",
        "no key of {user} is accepted",
        "put the public key of {user} into ~/.ssh/authorized_keys there, with a home directory "
        "that only {user} may write to; or sshd there lets {user} not in: AllowUsers, DenyUsers, "
        "AllowGroups, PermitRootLogin (sshd -T)"),
    LoginCause("no_shell", r"account is currently not available",
        "the login shell of {user} there is nologin",
        "usermod -s /bin/bash {user} there"),
    LoginCause("resolve", r"Could not resolve hostname", "the name does not resolve",
        "make the name known, in the DNS or in /etc/hosts; AddressFamily in the ssh configuration "
        "(ssh -G NAME) hides the addresses of the other family"),
    LoginCause("refused", r"Connection refused", "connection refused",
        "start sshd there; a firewall that rejects says the same"),
    LoginCause("no_route", r"No route to host|Network is unreachable|Host is down",
        "no route ({said})",
        "correct routes, interfaces or the firewall between the nodes"),
    LoginCause("silent", r"timed out during banner exchange",
        "sshd takes the connection and says nothing",
        "restart sshd there: it is stopped, stuck or overloaded"),
    LoginCause("timeout", r"timed out|not responding", "timed out",
        "look for a firewall that drops, a wrong address, or a node or home directory that hangs"),
    LoginCause("host_key_type", r"no matching host key type found",
        "no type of host key in common ({said})",
        "correct HostKeyAlgorithms (ssh -G NAME, as {user}, shows it) or the crypto policy, or "
        "give that host a key of another type: ssh-keygen -A"),
    LoginCause("algorithms", r"Unable to negotiate", "no algorithm in common ({said})",
        "give both ends the same crypto policy"),
    LoginCause("startups",
        r"Exceeded MaxStartups|Not allowed at this time|(kex|ssh)_exchange_identification: ",
        "sshd closes the connection before the login ({said})",
        "read sshd's log there: MaxStartups, PerSourcePenalties, hosts.deny (TCP wrappers)"),
    LoginCause("closed", r"Connection (closed|reset)|closed by remote host",
        "sshd closes the connection ({said})",
        "read sshd's log there: /etc/nologin and /run/nologin, PAM (pam_access), MaxStartups, "
        "or a host key that is missing"),
    LoginCause("own_config", "",
        "the ssh configuration of {user} alone stands in the way ({said})",
        "correct or remove these lines in ~/.ssh/config of {user}: ssh -G NAME, as {user}, shows "
        "what they make of NAME"),
    LoginCause("forced", "",
        "the key of {user} is there for another command alone (command= at {said})",
        "remove command= there, or give the jobs of {user} a key without it"),
    LoginCause("shell", "", "the login runs no command ({said})",
        "try `ssh NAME true` as {user}: the login shell there, its libraries and start-up files, "
        "a ForceCommand of its sshd"),
    LoginCause("other_host", "", "{said} answers",
        "correct the address of the name, in the DNS, /etc/hosts or ~/.ssh/config"),
    LoginCause("namesake", "", "nobody can tell them apart",
        "give every node a host name of its own (hostnamectl set-hostname)"),
    LoginCause("other", "", "{said}", "try `ssh -v NAME true` as {user}"),
)  # fmt: skip

CAUSES: dict[str, LoginCause] = {cause.key: cause for cause in _ORDERED_CAUSES}

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
    for cause in _ORDERED_CAUSES:
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
