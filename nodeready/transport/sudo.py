"""sudo on a node: a command as root, and what its answer means."""

from __future__ import annotations

import re

from nodeready import shell
from nodeready.transport.base import REFUSED, SUDO, TIMED_OUT, TIMEOUT, Answer, Failure, Reply


def with_sudo(command: str, password: str) -> str:
    """``command`` as root. In English, so that a refusal can be recognised.

    With a password, which is the first line of the input, and of no command line: a node that
    wants none would leave it to the command, hence the first test there.
    """
    if not password:
        return f"env LC_ALL=C sudo -n -H {command}"
    line = (
        "LC_ALL=C; export LC_ALL; "
        "if sudo -n -k -H true </dev/null 2>/dev/null; "
        'then read -r nr_password; exec sudo -n -H "$@"; fi; '
        'exec sudo -k -S -p "" -H "$@"'
    )
    return f"sh -c {shell.quote(line)} sh {command}"


def as_root(command: shell.ShellCommand, password: str) -> shell.ShellCommand:
    """The command as root; a password is the first line of its input."""
    stdin = f"{password}\n{command.stdin}" if password else command.stdin
    return shell.ShellCommand(with_sudo(command.line, password), stdin)


def judge_reply(reply: Reply, limit_s: float, sudo: bool) -> Answer:
    """The reply, or the failure that it is: ended by its limit, or (sudo) refused by sudo."""
    output = (reply.stdout, reply.stderr, reply.seconds)
    if reply.rc in TIMED_OUT and reply.seconds >= limit_s:
        return Failure(*output, TIMEOUT, f"ended after {limit_s:.0f} s")
    error, kind = sudo_error(reply.stderr) if sudo and reply.rc else ("", "")
    return Failure(*output, kind, error) if error else reply


def sudo_error(stderr: str) -> tuple[str, str]:
    """What sudo's own words (in English) mean, and their kind; "" twice when it has not refused.

    Its warnings (``unable to resolve host``) are none of these: the command ran.
    """
    for line in stderr.splitlines():
        is_sudo = re.match(r"sudo(-rs)?: ", line)
        if is_sudo and re.search(r"(password|interactive authentication) is required", line):
            return "sudo wants a password: run on a terminal to be asked, or allow NOPASSWD", SUDO
        if re.search(
            r"^sudo(-rs)?: .*(incorrect (password|authentication)|no password was)", line
        ):
            return "sudo refused the password", REFUSED
        if re.search(r" is not (in the sudoers file|allowed to )|may not run sudo", line):
            return f"sudo: {line.strip()}", REFUSED
        if re.search(r"^env: .*sudo.*No such file|^sh: .*sudo: not found", line):
            return "sudo is not installed", REFUSED
        if is_sudo and re.search(r"must have a tty|terminal is required", line):
            return line.strip(), REFUSED
    return "", ""
