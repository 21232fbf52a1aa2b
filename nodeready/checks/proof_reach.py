"""Judge whether the job's user gets from node to node without being asked anything."""

from __future__ import annotations

from nodeready.checks.declare import check, deploy
from nodeready.checks.proof_unseen import unseen
from nodeready.checks.ssh_causes import CAUSES, offending
from nodeready.policy import Policy
from nodeready.proofs.proved import Proved
from nodeready.proofs.reach import Reach, Trouble
from nodeready.proofs.seen import Peers, User
from nodeready.results import Result, fail, fixable, na, ok

_ALONE = "no other node to try"


@check(
    "proof.ssh",
    settings=("job_user",),
    fix=("install OpenSSH's client", deploy("nodeready deploy INVENTORY --only ssh_client")),
)
def ssh(seen: Proved, want: Policy) -> Result:
    """The job's user logs in from this node to others and back by ssh, without being asked.

    A launcher (pdsh, mpirun, DeepSpeed) stands still at the first question. Each login is made
    as a person would, with the user's own keys and configuration, and must end at the host that
    was asked for. A node that fails with several others is named once; the others are excused.
    """
    check = "proof.ssh"
    reach = seen.reach if isinstance(seen.reach, Reach) else None
    # Others may have seen what is wrong with a node that told nothing itself.
    if reach is None or not reach.ssh:
        found = unseen(check, seen, "peers", "reach")
        if found:
            return found
    elif isinstance(seen.user, User) and seen.user.error:
        return na(check, "no session: see proof.user")
    expected = "logs in to its peers, and they to it"
    if isinstance(seen.peers, Peers) and not seen.peers.ssh_installed:
        return fail(check, expected, "ssh is not installed", fix="install OpenSSH's client")
    assert reach is not None
    if not reach.to and not reach.by and not reach.ssh:
        return na(check, _ALONE)
    if not reach.ssh:
        excused = f"; {', '.join(reach.excused)}: see there" if reach.excused else ""
        worked = reach.to - len(reach.excused)
        return ok(check, expected, f"{worked} of {reach.to} peers{excused}")
    user = seen.user.name if isinstance(seen.user, User) else want.job_user or "the user"
    actual = "; ".join(_words(one, user) for one in reach.ssh)
    first = reach.ssh[0]
    if CAUSES[first.cause].deploy:
        fix = "nodeready deploy INVENTORY --only ssh_client"
        return fixable(check, expected, actual, offending(first.said), fix)
    return fail(check, expected, actual, fix=CAUSES[first.cause].fix.format(user=user))


def _words(one: Trouble, user: str) -> str:
    """One trouble in words: who, how many, why."""
    names = ", ".join(one.peers)
    why = CAUSES[one.cause].words.format(user=user, said=one.said)
    if one.kind == "namesake":
        return f"has the same host name as {names}: {why}"
    back = "; the way back works" if one.back else ""
    if one.kind == "pair":
        return f"cannot log in to {names}: {why}{back}"
    count = f"{len(one.peers)} of {one.tried} peers"
    if len(one.peers) < one.tried:
        count += f" ({names})"
    if one.kind == "target":
        return f"{count} cannot log in: {why}{back}"
    ways = ", nor they to it" if one.kind == "both" else ""
    return f"cannot log in to {count}{ways}: {why}{back}"


@check(
    "proof.pdsh",
    settings=("packages",),
    fix=(
        deploy("nodeready deploy INVENTORY --only debug_tools"),
        "install pdsh's ssh module (RHEL, SLES: pdsh-rcmd-ssh)",
        "pdsh -R ssh -w NAME true",
        "correct the addresses of these names, in the DNS or in /etc/hosts",
    ),
)
def pdsh(seen: Proved, want: Policy) -> Result:
    """pdsh brings an answer of its own from every peer that ssh reaches.

    Its exit status tells nothing (0 for a refused connection), so the answers are counted. It is
    asked with ``-R ssh``; whether that is also its default, pdsh.rcmd says.
    """
    check = "proof.pdsh"
    found = unseen(check, seen, "peers", "reach")
    if found:
        return found
    peers, reach = seen.peers, seen.reach
    assert isinstance(peers, Peers)
    assert isinstance(reach, Reach)
    expected = "an answer from every peer"
    if not peers.pdsh_installed:
        if "pdsh" not in want.packages:
            return na(check, "pdsh is neither installed nor in the policy's packages")
        fix = "nodeready deploy INVENTORY --only debug_tools"
        return fixable(check, expected, "pdsh is not installed", fix=fix)
    if not reach.asked:
        return na(check, "ssh reaches no peer: see proof.ssh" if reach.to else _ALONE)
    if reach.pdsh_said and len(reach.missing) == reach.asked:
        fix = "pdsh -R ssh -w NODE true"
        if "No such rcmd module" in reach.pdsh_said:
            fix = "install pdsh's ssh module (RHEL, SLES: pdsh-rcmd-ssh)"
        return fail(check, expected, f"no answer: {reach.pdsh_said}", fix=fix)
    if reach.missing:
        lost = ", ".join(f"{one.name} ({one.said or 'silent'})" for one in reach.missing)
        actual = f"{len(reach.missing)} of {reach.asked} peers did not answer: {lost}"
        return fail(check, expected, actual, fix=f"pdsh -R ssh -w {reach.missing[0].name} true")
    if reach.same:
        pairs = "; ".join(f"{' and '.join(one.names)} say {one.answer}" for one in reach.same)
        actual = f"{reach.asked} peers, host names: {reach.distinct}: {pairs}"
        fix = "correct the addresses of these names, in the DNS or in /etc/hosts"
        return fail(check, expected, actual, fix=fix)
    return ok(check, expected, f"{reach.distinct} of {reach.asked} peers")
