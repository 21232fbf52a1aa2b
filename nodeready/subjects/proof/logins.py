"""Judge whether the job's user gets from node to node without prompts, by ssh and pdsh."""

from __future__ import annotations

from nodeready.core.own_files import beatable
from nodeready.core.policy import Policy
from nodeready.core.result import Result, check, deploy, fail, fixable, join_first, na, ok
from nodeready.core.severity import loses_job
from nodeready.core.shell import quote
from nodeready.subjects.pdsh.facts import ENVIRONMENT, PROFILE_D, VARIABLE
from nodeready.subjects.proof.facts import Proved
from nodeready.subjects.proof.peer_facts import Peers, RcmdDefault, Reach, Trouble
from nodeready.subjects.proof.preconditions import observation
from nodeready.subjects.proof.session_facts import User
from nodeready.subjects.ssh_client.login_failures import (
    CAUSES,
    message_source,
    named_file,
    offending,
)

_ALONE = "no other node to try"


@check(
    "proof.ssh",
    loses_job("deploy", "install"),
    proof="peers",
    settings=("job_user",),
    fix=("install OpenSSH's client", deploy("nodeready deploy INVENTORY --only ssh_client")),
)
def ssh(observed: Proved, policy: Policy) -> Result:
    """The job's user logs in from this node to others and back by ssh, without being asked.

    A launcher (pdsh, mpirun, DeepSpeed) hangs at the first question. Each login is a user's
    ordinary login, with the user's keys and configuration, and must end at the host that
    was asked for. A node that fails with several peers is reported once; the peers are excused.
    """
    check = "proof.ssh"
    reach = observed.reach if isinstance(observed.reach, Reach) else None
    # Peers may have seen what is wrong with a node that gave no answer itself.
    if reach is None or not reach.ssh:
        for field, kind in (("peers", Peers), ("reach", Reach)):
            missing = observation(check, observed, field, kind)
            if isinstance(missing, Result):
                return missing
    elif isinstance(observed.user, User) and observed.user.error:
        return na(check, "no session: see proof.user")
    expected = "logs in to its peers, and they to it"
    if isinstance(observed.peers, Peers) and not observed.peers.ssh_installed:
        actual = "no ssh that the user can run (see ssh_client.installed)"
        return fail(check, expected, actual, fix="install OpenSSH's client")
    assert reach is not None
    if not reach.to and not reach.by and not reach.ssh:
        return na(check, _ALONE)
    if not reach.ssh:
        excused = f"; {', '.join(reach.excused)}: see there" if reach.excused else ""
        worked = reach.to - len(reach.excused)
        return ok(check, expected, f"{worked} of {reach.to} peers{excused}")
    user = observed.user.name if isinstance(observed.user, User) else policy.job_user or "the user"
    actual = "; ".join(_trouble_text(trouble, user) for trouble in reach.ssh)
    first = reach.ssh[0]
    if CAUSES[first.cause].deploy:
        fix = "nodeready deploy INVENTORY --only ssh_client"
        return fixable(check, expected, actual, offending(first.message), fix)
    fix = CAUSES[first.cause].fix.format(user=user, file=quote(named_file(first.message)))
    return fail(check, expected, actual, message_source(first.message), fix)


def _trouble_text(trouble: Trouble, user: str) -> str:
    """One trouble in words: which peers, how many, and the cause."""
    names = ", ".join(trouble.peers)
    cause = CAUSES[trouble.cause].words.format(user=user, said=trouble.message)
    if trouble.kind == "namesake":
        return f"has the same host name as {names}: {cause}"
    back = "; the way back works" if trouble.back else ""
    if trouble.kind == "pair":
        return f"cannot log in to {names}: {cause}{back}"
    count = f"{len(trouble.peers)} of {trouble.tried} peers"
    if len(trouble.peers) < trouble.tried:
        count += f" ({names})"
    if trouble.kind == "target":
        return f"{count} cannot log in: {cause}{back}"
    reverse = ", nor they to it" if trouble.kind == "both" else ""
    return f"cannot log in to {count}{reverse}: {cause}{back}"


@check(
    "proof.pdsh",
    loses_job("deploy", "configure", "install"),
    proof="peers",
    settings=("packages",),
    fix=(
        deploy("nodeready deploy INVENTORY --only debug_tools"),
        "install pdsh's ssh module (RHEL, SLES: pdsh-rcmd-ssh)",
        "pdsh -R ssh -w NAME true",
        deploy("nodeready deploy INVENTORY --only pdsh"),
        "remove the line WHERE",
        "PDSH_RCMD_TYPE=ssh in NAME's start-up files",
        "log in by ssh with a command and see what the user's shell makes of it",
        "look for exit in ~/.pdshrc",
        "correct the addresses of these names, in the DNS or in /etc/hosts",
    ),
)
def pdsh(observed: Proved, policy: Policy) -> Result:
    """pdsh brings a separate answer from every peer that ssh reaches, and the peers' from it.

    Its exit status tells nothing (0 for a refused connection), so the answers are counted. It is
    run as the user would: with the default remote command of the user's login shell and of an
    interactive one. A remote command other than ssh fails when it brings no answer; rsh is not
    tried. A ~/.pdshrc, which commands over pdsh read first, does not end them.
    """
    check = "proof.pdsh"
    if isinstance(observed.reach, Reach) and observed.reach.pdsh_by:
        peers_text = join_first(observed.reach.pdsh_by, ", ")
        actual = f"does not answer the pdsh of {peers_text} as itself"
        fix = "log in by ssh with a command and see what the user's shell makes of it"
        return fail(check, "an answer to every peer", actual, fix=fix)
    peers = observation(check, observed, "peers", Peers)
    if isinstance(peers, Result):
        return peers
    reach = observation(check, observed, "reach", Reach)
    if isinstance(reach, Result):
        return reach
    expected = "an answer from every peer"
    if not peers.pdsh_installed:
        if "pdsh" not in policy.packages:
            return na(check, "pdsh is neither installed nor in the policy's packages")
        fix = "nodeready deploy INVENTORY --only debug_tools"
        return fixable(check, expected, "pdsh is not installed", fix=fix)
    if not reach.pdsh_targets:
        return na(check, "ssh reaches no peer: see proof.ssh" if reach.to else _ALONE)
    if reach.pdsh_said and len(reach.missing) == reach.pdsh_targets:
        fix = "pdsh -R ssh -w NODE true"
        if "No such rcmd module" in reach.pdsh_said:
            fix = "install pdsh's ssh module (RHEL, SLES: pdsh-rcmd-ssh)"
        return fail(check, expected, f"no answer: {reach.pdsh_said}", fix=fix)
    broken = [
        default
        for default in peers.defaults
        if not default.works and (default.rcmd or default.messages)
    ]
    if broken:
        return _wrong_default(check, expected, broken, observed)
    if reach.missing:
        lost = ", ".join(f"{peer.name} ({peer.message or 'silent'})" for peer in reach.missing)
        actual = f"{len(reach.missing)} of {reach.pdsh_targets} peers did not answer: {lost}"
        fix = f"pdsh -R ssh -w {quote(reach.missing[0].name)} true"
        return fail(check, expected, actual, fix=fix)
    if reach.same:
        pairs = "; ".join(f"{' and '.join(same.names)} say {same.answer}" for same in reach.same)
        actual = f"{reach.pdsh_targets} peers, host names: {reach.distinct}: {pairs}"
        fix = "correct the addresses of these names, in the DNS or in /etc/hosts"
        return fail(check, expected, actual, fix=fix)
    if peers.pdshrc:
        actual = f"no command behind `. ~/.pdshrc` runs: {peers.pdshrc}"
        return fail(check, expected, actual, "~/.pdshrc", "look for exit in ~/.pdshrc")
    return ok(check, expected, f"{reach.distinct} of {reach.pdsh_targets} peers")


def _wrong_default(
    check: str, expected: str, broken: list[RcmdDefault], observed: Proved
) -> Result:
    """The failure of pdsh's default remote command, and the line that sets it."""
    user = observed.user_name
    first = broken[0]
    kinds = [default.kind for default in broken if default.rcmd == first.rcmd]
    shells = f"{' and '.join(kinds)} shell{'s' if len(kinds) > 1 else ''}"
    failure = f"takes {first.rcmd}" if first.rcmd else f"does not start ({first.messages})"
    actual = f"pdsh {failure} in {user}'s {shells}"
    deploy_fix = "nodeready deploy INVENTORY --only pdsh"
    if first.value is None and not first.set_by:
        # No file sets the remote command: this is how pdsh was built, or Debian's rcmd_default.
        return fixable(check, expected, f"{actual}, by default", "", deploy_fix)
    value_text = f": {VARIABLE} is {first.value}" if first.value not in (None, "ssh") else ""
    by = f" by {first.set_by}" if first.set_by else ""
    directory, _, name = first.set_by.rpartition(":")[0].rpartition("/")
    if f"{directory}/{name}" == ENVIRONMENT or (directory == PROFILE_D and beatable(name)):
        return fixable(check, expected, f"{actual}{value_text}{by}", first.set_by, deploy_fix)
    fix = f"remove the line {first.set_by}" if first.set_by else ""
    fix = fix or f"{VARIABLE}=ssh in {user}'s start-up files"
    return fail(check, expected, f"{actual}{value_text}{by}", first.set_by, fix)
