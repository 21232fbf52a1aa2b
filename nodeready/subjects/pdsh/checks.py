"""Judge whether pdsh reaches every node by ssh, from every kind of shell, with the job's tools."""

from __future__ import annotations

import re
from collections.abc import Iterable

from nodeready.core import own_files, shell
from nodeready.core.base import Line, grouped
from nodeready.core.own_files import beatable
from nodeready.core.policy import Policy
from nodeready.core.result import Check, FactKinds, Result, Subject, check, deploy
from nodeready.core.severity import loses_job
from nodeready.subjects.access import COMPANIONS, closed_result, unusable_program
from nodeready.subjects.pdsh import facts
from nodeready.subjects.pdsh.facts import Pdsh, PdshUser

TYPE = "ssh"
_DEPLOY_PACKAGES = "nodeready deploy: debug_tools.packages"
MODULE_FIX = "install pdsh's ssh module (RHEL, SLES: pdsh-rcmd-ssh)"
_AGAIN_FIX = "install pdsh again the way this distribution does"
_BACKSLASH_FIX = f"remove the backslash at the end of {facts.ENVIRONMENT}"
_SETS = re.compile(
    rf"""(?:(?:^|[\s;&|({{]){facts.VARIABLE}=|\bsetenv\s+{facts.VARIABLE}\s+)(["']?)([^"'\s;&|)]*)\1"""
    rf"|\bunset(?:env)?\s+(?:-v\s+)?{facts.VARIABLE}\b"
)


@check("pdsh.installed", loses_job("deploy", "configure", "install"), settings=("packages",),
       expects="installed", fix=(
    "install the package pdsh",
    MODULE_FIX,
    "chmod a+rx PATH",
    _AGAIN_FIX,
    "chown root PATH",
    "chmod o-w PATH",
    deploy(_DEPLOY_PACKAGES),
))  # fmt: skip
def installed(observed: Pdsh, policy: Policy) -> Result:
    """pdsh and its ssh module (a separate package on RHEL and SLES) are installed, and every user
    can run pdsh.

    pdsh loads no module that, or whose directory, belongs to another user than root or pdsh's own
    owner, or that all may write to (pdsh, src/pdsh/mod.c).
    """
    programs = ("pdsh", *COMPANIONS["pdsh"])
    troubles = (unusable_program(observed.access, program) for program in programs)
    trouble = next(filter(None, troubles), None)
    if observed.installed and trouble is not None:
        if trouble.repair and "pdsh" in policy.packages:
            words, path = trouble.words, trouble.path
            return installed.fixable(words, path, fix=_DEPLOY_PACKAGES)
        closed = "has mode" in trouble.words
        fix = f"chmod a+rx {shell.quote(trouble.path)}" if closed else _AGAIN_FIX
        judged = installed.warn if trouble.chosen else installed.fail
        return judged(trouble.words, trouble.path, fix)
    if not observed.installed:
        if "pdsh" in policy.packages:
            return installed.fixable("not installed", fix=_DEPLOY_PACKAGES)
        return installed.fail("not installed", fix="install the package pdsh")
    if not observed.module:
        return installed.warn("no sshcmd.so found", fix=MODULE_FIX, expected="installed, with ssh")
    return _insecure_module(observed) or installed.ok(
        source=observed.module, expected="installed, with ssh"
    )


def _insecure_module(observed: Pdsh) -> Result | None:
    """The result for a module that pdsh refuses to load; None: it loads the module."""
    access = observed.access
    pdsh = next((path for name in ("pdsh.bin", "pdsh") for path in access.programs(name)), "")
    owners = {0, access.inodes[pdsh].uid} if pdsh in access.inodes else {0}
    if (insecure := access.insecure(observed.module, owners)) is None:
        return None
    path, inode = insecure
    fault, repair = f"belongs to uid {inode.uid}", "chown root"
    if inode.uid in owners:
        fault, repair = f"has mode {inode.mode & 0o7777:o}, all may write to it", "chmod o-w"
    actual = f"pdsh refuses its ssh module: {path} {fault}"
    fix = f"{repair} {shell.quote(path)}"
    return installed.fail(actual, path, fix, expected="installed, with ssh")


def assigned(line: Line) -> str | None:
    """The value that a line of a shell start-up file gives to the variable.

    "" for a line that unsets the variable, None for one that only uses it.
    """
    values = [match[2] or "" for match in _SETS.finditer(line.text)]
    return values[-1] if values else None


def _in_profile(observed: Pdsh, suffix: str) -> list[tuple[str, Line]]:
    """The assignments in profile.d in the order of the file names, which is the shells' order."""
    lines = [line for line in observed.settings if line.path.rpartition("/")[0] == facts.PROFILE_D]
    lines.sort(key=lambda line: (line.path.encode("utf-8", "surrogateescape"), line.number))
    assignments = ((assigned(line), line) for line in lines if line.path.endswith(suffix))
    return [(value, line) for value, line in assignments if value is not None]


def last_in_profile(observed: Pdsh, suffix: str) -> str:
    """Name of the last foreign file of profile.d that sets it and that ours can follow, or ""."""
    names = [line.path.rpartition("/")[2] for _, line in _in_profile(observed, suffix)]
    candidates = (name for name in reversed(names) if "nodeready" not in name and beatable(name))
    return next(candidates, "")


def suffixes(observed: Pdsh) -> tuple[str, ...]:
    """The kinds of shells whose profile.d files matter on this node."""
    return (".sh", ".csh") if observed.csh else (".sh",)


def _places(observed: Pdsh) -> Iterable[tuple[str, str, str]]:
    """(place, its value, its line) of each place from which some shell gets the remote command."""
    if observed.debian:
        content = observed.rcmd_default
        value = "unset" if content is None else content.decode("utf-8", "replace").rstrip("\n")
        yield facts.RCMD_DEFAULT, value, facts.RCMD_DEFAULT if content is not None else ""
    setting, number = facts.in_environment(observed.environment or b"")
    source = f"{facts.ENVIRONMENT}:{number}" if number else ""
    yield facts.ENVIRONMENT, "unset" if setting is None else setting, source
    for suffix in suffixes(observed):
        value, source = "unset", ""
        for last_value, line in _in_profile(observed, suffix)[-1:]:
            value, source = last_value, line.source
        yield f"{facts.PROFILE_D}/*{suffix}", value, source


@check("pdsh.rcmd", loses_job("deploy", "configure"), settings=("packages",), fixed_by="pdsh.rcmd",
       expects=TYPE, fix=(
    _BACKSLASH_FIX,
    "remove the line WHERE: no file can be read after it",
    "let users read PATH",
))  # fmt: skip
def rcmd(observed: Pdsh, policy: Policy) -> Result:
    """pdsh's remote command is ssh in every kind of shell.

    Debian's default is rsh; its /usr/bin/pdsh is a script that takes the type from
    /etc/pdsh/rcmd_default unless the environment names one. Elsewhere the environment alone
    counts: pam_env gives /etc/environment to ssh sessions, su and cron, profile.d serves login
    shells without PAM.
    """
    if _absent(observed, policy):
        return rcmd.na("pdsh is neither installed nor in the policy's packages")
    if not (misset := [setting for setting in _places(observed) if setting[1] != TYPE]):
        files = read_by_users(observed)
        results = (closed_result(rcmd, observed.access, path) for path in files)
        return next(filter(None, results), None) or rcmd.ok()
    places_of = grouped((value, place) for place, value, _ in misset)
    texts = {value: ", ".join(places) for value, places in places_of.items()}
    actual = "; ".join(f"{v} in {text.replace(', /etc/', ', ')}" for v, text in texts.items())
    source = next((line_source for _, _, line_source in misset if line_source), "")
    if own_files.remove_block(observed.environment or b"").rstrip().endswith(b"\\"):
        # pam_env joins the next line to such a line, and that would be ours.
        return rcmd.fail(actual, facts.ENVIRONMENT, _BACKSLASH_FIX)
    for _, _, line_source in misset:
        if line_source.startswith(facts.PROFILE_D) and not beatable(
            line_source.rpartition("/")[2]
        ):
            fix = f"remove the line {line_source}: no file can be read after it"
            return rcmd.fail(actual, line_source, fix)
    return rcmd.fixable(actual, source)


def read_by_users(observed: Pdsh) -> tuple[str, ...]:
    """The files that a user's pdsh and login shell read: Debian's, ours, the ssh module."""
    own_paths = {
        line.path
        for line in observed.settings
        if line.path.startswith(f"{facts.PROFILE_D}/") and "nodeready" in line.path
    }
    places = [facts.RCMD_DEFAULT] if observed.debian else []
    return (*places, *sorted(own_paths), *([observed.module] if observed.module else []))


@check("pdsh.conflicts", loses_job("configure"), settings=("packages",), expects="none",
       fix="remove the line LINES")  # fmt: skip
def conflicts(observed: Pdsh, policy: Policy) -> Result:
    """No other start-up file of a shell sets another remote command.

    /etc/bash.bashrc and the like are read by shells that never see profile.d, or after it.
    """
    if _absent(observed, policy):
        return conflicts.na("pdsh is neither installed nor in the policy's packages")
    texts, sources = [], []
    for line in observed.settings:
        value = assigned(line)
        if value not in (None, TYPE) and not line.path.startswith(f"{facts.PROFILE_D}/"):
            texts.append(f"{value or 'unset'} ({line.source})")
            sources.append(line.source)
    if not texts:
        return conflicts.ok()
    return conflicts.warn(", ".join(texts), sources[0], f"remove the line {', '.join(sources)}")


def pdshrc_lines(policy: Policy) -> list[str]:
    """The shell lines of the block in ~/.pdshrc: quick, and silent on standard output."""
    lines = []
    for directory in reversed(policy.pdshrc_path):
        word = shell.quote(directory)
        lines.append(f'case ":$PATH:" in *:{word}:*) ;; *) PATH={word}:$PATH ;; esac')
    if policy.pdshrc_path:
        lines.append("export PATH")
    if policy.pdshrc_activate:
        lines.extend(("{", policy.pdshrc_activate, "} >/dev/null"))
    return [*lines, *policy.pdshrc_lines]


def has_block(user: PdshUser, policy: Policy) -> bool:
    """Whether the user's ~/.pdshrc has our block, with the policy's lines."""

    def code(lines: Iterable[str]) -> list[str]:
        return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]

    if (inner := own_files.find_block(user.pdshrc or b"")) is None:
        return False
    lines = inner.decode("utf-8", "surrogateescape").split("\n")
    return code(lines) == code(pdshrc_lines(policy))


@check("pdsh.pdshrc", loses_job("deploy"),
       settings=("packages", "pdshrc_users", "pdshrc_path", "pdshrc_activate", "pdshrc_lines"),
       fixed_by="pdsh.pdshrc")  # fmt: skip
def pdshrc(observed: Pdsh, policy: Policy) -> Result:
    """The policy's users have nodeready's block in ~/.pdshrc; their own lines stay.

    A non-interactive shell leaves most .bashrc files at once: ``pdsh … '. ~/.pdshrc; …'`` is how
    jobs get their PATH and environment. Where a person's own file lacks the block, the result is a
    warning, so that no user can stop the jobs of others.
    """
    if result := _without_users(pdshrc, observed, policy):
        return result
    affected = [u for u in observed.users if not u.trouble and not has_block(u, policy)]
    check = pdshrc.expecting(f"our block for {', '.join(policy.pdshrc_users)}")
    if not affected:
        return check.ok()
    words = {True: "no file", False: "not the block"}
    actual = ", ".join(f"{user.name}: {words[user.pdshrc is None]}" for user in affected)
    status = "warn" if all(user.person for user in affected) else "fail"
    return check.fixable(actual, affected[0].path, status=status)


@check("pdsh.users", loses_job("configure"),
       settings=("packages", "pdshrc_users", "pdshrc_path", "pdshrc_activate", "pdshrc_lines"),
       fix="make the user and home directory, or take the name out of pdshrc_users")  # fmt: skip
def users(observed: Pdsh, policy: Policy) -> Result:
    """The policy's pdshrc_users exist here, with a home directory that they may write to."""
    if result := _without_users(users, observed, policy):
        return result
    bad = [user for user in observed.users if user.trouble and not has_block(user, policy)]
    if not bad:
        return users.ok(expected=", ".join(policy.pdshrc_users))
    actual = "; ".join(f"{user.name} {user.trouble}" for user in bad)
    return users.warn(actual, bad[0].home, expected=", ".join(policy.pdshrc_users))


def _without_users(check: Check, observed: Pdsh, policy: Policy) -> Result | None:
    """The result of a check of users that cannot be judged; None: they can be."""
    if not policy.pdshrc_users:
        return check.na("the policy names no pdshrc_users")
    if _absent(observed, policy):
        return check.na("no pdsh")
    if observed.users_unknown:
        return check.unknown(f"the users' home directories: {observed.users_unknown}")
    return None


def _absent(observed: Pdsh, policy: Policy) -> bool:
    """Whether pdsh is neither installed nor among the policy's packages: nothing to judge then."""
    return not observed.installed and "pdsh" not in policy.packages


SUBJECT = Subject(
    "pdsh", __doc__, checks=(installed, rcmd, conflicts, pdshrc, users), probe=facts.PROBE,
    files=("/etc/profile.d/*nodeready*",),
    kinds=FactKinds(
        volatile="number size_bytes",
        elements={"users": "name", "access.seen": "", "access.links": "", "access.unloaded": ""},
    ),
)  # fmt: skip
