"""Judge whether pdsh reaches every node by ssh, from every kind of shell, with the job's tools."""

from __future__ import annotations

import re
from collections.abc import Iterable

from nodeready import shell
from nodeready.policy import Policy
from nodeready.subjects import managed_block
from nodeready.subjects.access import COMPANIONS, chmod_mends, stuck
from nodeready.subjects.base import Line, beatable
from nodeready.subjects.pdsh.facts import (
    ENVIRONMENT,
    PROBE,
    PROFILE_D,
    RCMD_DEFAULT,
    VARIABLE,
    Pdsh,
    User,
    in_environment,
)
from nodeready.subjects.result import (
    Result,
    Subject,
    check,
    deploy,
    fail,
    fixable,
    na,
    ok,
    unknown,
    warn,
)

TYPE = "ssh"
_SETS = re.compile(
    rf"""(?:(?:^|[\s;&|({{]){VARIABLE}=|\bsetenv\s+{VARIABLE}\s+)(["']?)([^"'\s;&|)]*)\1"""
    rf"|\bunset(?:env)?\s+(?:-v\s+)?{VARIABLE}\b"
)


@check(
    "pdsh.installed",
    settings=("packages",),
    fix=(
        "install the package pdsh",
        "install pdsh's ssh module (RHEL, SLES: pdsh-rcmd-ssh)",
        "chmod a+rx PATH",
        "install pdsh again the way this distribution does",
        deploy("nodeready deploy: debug_tools.packages"),
    ),
)
def installed(seen: Pdsh, want: Policy) -> Result:
    """pdsh is there, with its ssh module (a package of its own on RHEL and SLES), and every user
    can run it."""
    check = "pdsh.installed"
    programs = ("pdsh", *COMPANIONS["pdsh"])
    trouble = next(filter(None, (stuck(seen.access, one) for one in programs)), None)
    if seen.installed and trouble is not None:
        if trouble.mend and "pdsh" in want.packages:
            fix = "nodeready deploy: debug_tools.packages"
            return fixable(check, "installed", trouble.words, trouble.path, fix=fix)
        fix = "install pdsh again the way this distribution does"
        if "has mode" in trouble.words:
            fix = f"chmod a+rx {trouble.path}"
        judged = warn if trouble.chosen else fail
        return judged(check, "installed", trouble.words, trouble.path, fix)
    if not seen.installed:
        if "pdsh" in want.packages:
            fix = "nodeready deploy: debug_tools.packages"
            return fixable(check, "installed", "not installed", fix=fix)
        return fail(check, "installed", "not installed", fix="install the package pdsh")
    if not seen.module:
        fix = "install pdsh's ssh module (RHEL, SLES: pdsh-rcmd-ssh)"
        return warn(check, "installed, with ssh", "no sshcmd.so found", fix=fix)
    return ok(check, "installed, with ssh", source=seen.module)


def assigned(line: Line) -> str | None:
    """The value that a line of a shell start-up file gives to the variable.

    "" for a line that unsets the variable, None for one that only uses it.
    """
    found = None
    for match in _SETS.finditer(line.text):
        found = match[2] or ""
    return found


def _in_profile(seen: Pdsh, suffix: str) -> list[tuple[str, Line]]:
    """The assignments in profile.d in the order of the file names, which is the shells' order."""
    lines = [
        line
        for line in seen.settings
        if line.path.rpartition("/")[0] == PROFILE_D and line.path.endswith(suffix)
    ]
    lines.sort(key=lambda line: (line.path.encode("utf-8", "surrogateescape"), line.number))
    return [(value, line) for line in lines if (value := assigned(line)) is not None]


def last_in_profile(seen: Pdsh, suffix: str) -> str:
    """Base name of the last file of profile.d that sets the variable, is not ours and can be
    followed by ours; "" for none.
    """
    names = [line.path.rpartition("/")[2] for _, line in _in_profile(seen, suffix)]
    others = (name for name in reversed(names) if "nodeready" not in name and beatable(name))
    return next(others, "")


def suffixes(seen: Pdsh) -> tuple[str, ...]:
    """The kinds of shells whose profile.d files matter on this node."""
    return (".sh", ".csh") if seen.csh else (".sh",)


def _places(seen: Pdsh) -> Iterable[tuple[str, str, str]]:
    """(place, its value, its line) of each place from which some shell gets the remote command."""
    if seen.debian:
        content = seen.rcmd_default
        value = "unset" if content is None else content.decode("utf-8", "replace").rstrip("\n")
        yield RCMD_DEFAULT, value, RCMD_DEFAULT if content is not None else ""
    setting, number = in_environment(seen.environment or b"")
    source = f"{ENVIRONMENT}:{number}" if number else ""
    yield ENVIRONMENT, "unset" if setting is None else setting, source
    for suffix in suffixes(seen):
        found = _in_profile(seen, suffix)
        value, source = (found[-1][0], found[-1][1].where) if found else ("unset", "")
        yield f"{PROFILE_D}/*{suffix}", value, source


@check(
    "pdsh.rcmd",
    settings=("packages",),
    fixed_by="pdsh.rcmd",
    fix=(
        "remove the backslash at the end of /etc/environment",
        "remove the line WHERE: no file can be read after it",
        "let users read PATH",
    ),
)
def rcmd(seen: Pdsh, want: Policy) -> Result:
    """pdsh's remote command is ssh in every kind of shell.

    Debian's default is rsh; its /usr/bin/pdsh is a script that takes the type from
    /etc/pdsh/rcmd_default unless the environment names one. Elsewhere the environment alone
    counts: pam_env gives /etc/environment to ssh sessions, su and cron, profile.d serves login
    shells without PAM.
    """
    check = "pdsh.rcmd"
    if _absent(seen, want):
        return na(check, "pdsh is neither installed nor in the policy's packages")
    wrong = [place for place in _places(seen) if place[1] != TYPE]
    if not wrong:
        return _closed(seen) or ok(check, TYPE)
    values: dict[str, list[str]] = {}
    for what, value, _ in wrong:
        values.setdefault(value, []).append(what)
    actual = "; ".join(
        f"{value} in {', '.join(places).replace(', /etc/', ', ')}"
        for value, places in values.items()
    )
    source = next((where for _, _, where in wrong if where), "")
    if managed_block.remove(seen.environment or b"").rstrip().endswith(b"\\"):
        # pam_env joins the next line to such a line, and that would be ours.
        fix = f"remove the backslash at the end of {ENVIRONMENT}"
        return fail(check, TYPE, actual, ENVIRONMENT, fix)
    for _, _, where in wrong:
        if where.startswith(PROFILE_D) and not beatable(where.rpartition("/")[2]):
            fix = f"remove the line {where}: no file can be read after it"
            return fail(check, TYPE, actual, where, fix)
    return fixable(check, TYPE, actual, source)


def read_by_users(seen: Pdsh) -> tuple[str, ...]:
    """What the pdsh and the login shell of a user read: Debian's file, ours, the ssh module."""
    ours = {
        line.path
        for line in seen.settings
        if line.path.startswith(f"{PROFILE_D}/") and "nodeready" in line.path
    }
    places = [RCMD_DEFAULT] if seen.debian else []
    return (*places, *sorted(ours), *([seen.module] if seen.module else []))


def _closed(seen: Pdsh) -> Result | None:
    """The result for a file of those that users cannot read; None: they can read them all."""
    for path in read_by_users(seen):
        barrier = seen.access.barrier(path)
        if barrier is None:
            continue
        check, where = "pdsh.rcmd", barrier.path
        if where == path or chmod_mends(barrier, path):
            return fixable(check, TYPE, barrier.words, where)
        return fail(check, TYPE, barrier.words, where, f"let users read {where}")
    return None


@check("pdsh.conflicts", settings=("packages",), fix=("remove the line LINES",))
def conflicts(seen: Pdsh, want: Policy) -> Result:
    """No other start-up file of a shell sets another remote command.

    /etc/bash.bashrc and the like are read by shells that never see profile.d, or after it.
    """
    check = "pdsh.conflicts"
    if _absent(seen, want):
        return na(check, "pdsh is neither installed nor in the policy's packages")
    found = []
    for line in seen.settings:
        value = assigned(line)
        if value not in (None, TYPE) and not line.path.startswith(f"{PROFILE_D}/"):
            found.append((f"{value or 'unset'} ({line.where})", line.where))
    if not found:
        return ok(check, "none")
    actual = ", ".join(text for text, _ in found)
    lines = ", ".join(where for _, where in found)
    return warn(check, "none", actual, found[0][1], f"remove the line {lines}")


def pdshrc_lines(want: Policy) -> list[str]:
    """The shell lines of the block in ~/.pdshrc: quick, and silent on standard output."""
    lines = []
    for directory in reversed(want.pdshrc_path):
        word = shell.quote(directory)
        lines.append(f'case ":$PATH:" in *:{word}:*) ;; *) PATH={word}:$PATH ;; esac')
    if want.pdshrc_path:
        lines.append("export PATH")
    if want.pdshrc_activate:
        lines.extend(("{", want.pdshrc_activate, "} >/dev/null"))
    return [*lines, *want.pdshrc_lines]


def _code(lines: Iterable[str]) -> list[str]:
    """The lines without blank ones and comments."""
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def has_block(user: User, want: Policy) -> bool:
    """Whether the user's ~/.pdshrc has our block, with the policy's lines."""
    inner = managed_block.find(user.pdshrc or b"")
    if inner is None:
        return False
    return _code(inner.decode("utf-8", "surrogateescape").split("\n")) == _code(pdshrc_lines(want))


@check(
    "pdsh.pdshrc",
    settings=("packages", "pdshrc_users", "pdshrc_path", "pdshrc_activate", "pdshrc_lines"),
    fixed_by="pdsh.pdshrc",
)
def pdshrc(seen: Pdsh, want: Policy) -> Result:
    """The policy's users have our block in ~/.pdshrc, beside whatever else is there.

    A non-interactive shell leaves most .bashrc files at once: ``pdsh … '. ~/.pdshrc; …'`` is how
    jobs get their PATH and environment. A person can take the block out of the own file at any
    time: then it is a warning, so that no user stops the jobs of others.
    """
    check = "pdsh.pdshrc"
    if _absent(seen, want) or not want.pdshrc_users:
        return na(
            check, "the policy names no pdshrc_users" if not want.pdshrc_users else "no pdsh"
        )
    if seen.users_unknown:
        return unknown(check, f"the users' home directories: {seen.users_unknown}")
    wrong = [user for user in seen.users if not user.trouble and not has_block(user, want)]
    expected = f"our block for {', '.join(want.pdshrc_users)}"
    if not wrong:
        return ok(check, expected)
    actual = ", ".join(
        f"{user.name}: {'no file' if user.pdshrc is None else 'not the block'}" for user in wrong
    )
    status = "warn" if all(user.person for user in wrong) else "fail"
    return fixable(check, expected, actual, wrong[0].path, status=status)


@check(
    "pdsh.users",
    settings=("packages", "pdshrc_users", "pdshrc_path", "pdshrc_activate", "pdshrc_lines"),
    fix=("make the user and home directory, or take the name out of pdshrc_users",),
)
def users(seen: Pdsh, want: Policy) -> Result:
    """The policy's pdshrc_users exist here, with a home directory that they may write to."""
    check = "pdsh.users"
    if _absent(seen, want) or not want.pdshrc_users:
        return na(
            check, "the policy names no pdshrc_users" if not want.pdshrc_users else "no pdsh"
        )
    if seen.users_unknown:
        return unknown(check, f"the users' home directories: {seen.users_unknown}")
    bad = [user for user in seen.users if user.trouble and not has_block(user, want)]
    if not bad:
        return ok(check, ", ".join(want.pdshrc_users))
    actual = "; ".join(f"{user.name} {user.trouble}" for user in bad)
    fix = "make the user and home directory, or take the name out of pdshrc_users"
    return warn(check, ", ".join(want.pdshrc_users), actual, bad[0].home, fix)


def _absent(seen: Pdsh, want: Policy) -> bool:
    """Whether pdsh is neither installed nor among the policy's packages: nothing to judge then."""
    return not seen.installed and "pdsh" not in want.packages


SUBJECT = Subject(
    "pdsh",
    __doc__,
    checks=(installed, rcmd, conflicts, pdshrc, users),
    probe=PROBE,
    files=("/etc/profile.d/*nodeready*",),
)
