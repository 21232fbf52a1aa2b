"""sudo on a node: a command as root, and what its answer means."""

from __future__ import annotations

import re
from dataclasses import replace

from nodeready.agent.asking import TIMED_OUT, Answer
from nodeready.core import shell
from nodeready.core.outcome import REFUSED, SUDO, TIMEOUT, Gap


def with_sudo(command: str, password: str) -> str:
    """``command`` as root. In English, so that a refusal can be recognised.

    The password is the first line of the input, never on a command line. Where sudo wants no
    password, the shell reads that line, so that the command does not.
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
    stdin = f"{password}\n{command.stdin}" if password else command.stdin
    return shell.ShellCommand(with_sudo(command.line, password), stdin)


def judge_reply(reply: Answer, limit_s: float, sudo: bool) -> Answer:
    """The reply, with a gap if its limit ended the script or (``sudo``) sudo refused it."""
    if reply.rc in TIMED_OUT and reply.seconds >= limit_s:
        return replace(reply, gap=Gap(TIMEOUT, f"ended after {limit_s:.0f} s"))
    error, kind = sudo_error(reply.stderr) if sudo and reply.rc else ("", "")
    return replace(reply, gap=Gap(kind, error)) if error else reply


def sudo_error(stderr: str) -> tuple[str, str]:
    """The error of sudo's own words (in English), and its kind; "" twice when it has not refused.
    After a warning (``unable to resolve host``) the command ran: that is no error.
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
