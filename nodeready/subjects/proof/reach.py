"""Judge whether the job's user gets from node to node unasked, and a job's processes can meet."""

from __future__ import annotations

from nodeready.policy import Policy
from nodeready.shell import quote
from nodeready.subjects.base import Unknown
from nodeready.subjects.own_files import beatable
from nodeready.subjects.pdsh.facts import ENVIRONMENT, PROFILE_D, VARIABLE
from nodeready.subjects.ports.checks import folded
from nodeready.subjects.ports.netfilter import range_text
from nodeready.subjects.proof.facts import (
    COLLECTIVE,
    MESH,
    Blocked,
    Collective,
    Mesh,
    Peers,
    Proved,
    RcmdDefault,
    Reach,
    Trouble,
    User,
)
from nodeready.subjects.result import (
    Result,
    check,
    deploy,
    fail,
    fixable,
    na,
    ok,
    some,
    unknown,
    warn,
)
from nodeready.subjects.ssh_client.checks import CAUSES, named_file, offending, where_of


def unseen(check: str, seen: Proved, *fields: str) -> Result | None:
    """The result of a check that rests on these fields of `Proved`; None: all were seen."""
    if isinstance(seen.user, User) and seen.user.error:
        return na(check, "no session: see proof.user")
    for name in fields:
        value = getattr(seen, name)
        if value is None:
            return na(check, "not proved")
        if isinstance(value, Unknown):
            evidence = f": {value.evidence}" if value.evidence else ""
            return unknown(check, f"{value.reason}{evidence}")
    return None


# --- Logins: ssh and pdsh between the nodes.

_ALONE = "no other node to try"


@check(
    "proof.ssh",
    proof="peers",
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
    # Peers may have seen what is wrong with a node that gave no answer itself.
    if reach is None or not reach.ssh:
        found = unseen(check, seen, "peers", "reach")
        if found:
            return found
    elif isinstance(seen.user, User) and seen.user.error:
        return na(check, "no session: see proof.user")
    expected = "logs in to its peers, and they to it"
    if isinstance(seen.peers, Peers) and not seen.peers.ssh_installed:
        actual = "no ssh that the user can run (see ssh_client.installed)"
        return fail(check, expected, actual, fix="install OpenSSH's client")
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
    fix = CAUSES[first.cause].fix.format(user=user, file=quote(named_file(first.said)))
    return fail(check, expected, actual, where_of(first.said), fix)


def _words(one: Trouble, user: str) -> str:
    """One trouble in words: which peers, how many, and the cause."""
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
def pdsh(seen: Proved, want: Policy) -> Result:
    """pdsh brings an answer of its own from every peer that ssh reaches, and they from it.

    Its exit status tells nothing (0 for a refused connection), so the answers are counted. It is
    run as the user would: with the remote command that it takes in the user's own login shell and
    in an interactive one, whatever gives it there. One other than ssh fails when it brings no
    answer; rsh is not tried. A ~/.pdshrc, which commands over pdsh read first, does not end them.
    """
    check = "proof.pdsh"
    if isinstance(seen.reach, Reach) and seen.reach.pdsh_by:
        actual = f"does not answer the pdsh of {some(seen.reach.pdsh_by, ', ', _MOST)} as itself"
        fix = "log in by ssh with a command and see what the user's shell makes of it"
        return fail(check, "an answer to every peer", actual, fix=fix)
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
    wrong = [one for one in peers.defaults if not one.works and (one.rcmd or one.said)]
    if wrong:
        return _wrong_default(check, expected, wrong, seen)
    if reach.missing:
        lost = ", ".join(f"{one.name} ({one.said or 'silent'})" for one in reach.missing)
        actual = f"{len(reach.missing)} of {reach.asked} peers did not answer: {lost}"
        return fail(
            check, expected, actual, fix=f"pdsh -R ssh -w {quote(reach.missing[0].name)} true"
        )
    if reach.same:
        pairs = "; ".join(f"{' and '.join(one.names)} say {one.answer}" for one in reach.same)
        actual = f"{reach.asked} peers, host names: {reach.distinct}: {pairs}"
        fix = "correct the addresses of these names, in the DNS or in /etc/hosts"
        return fail(check, expected, actual, fix=fix)
    if peers.pdshrc:
        actual = f"no command behind `. ~/.pdshrc` runs: {peers.pdshrc}"
        return fail(check, expected, actual, "~/.pdshrc", "look for exit in ~/.pdshrc")
    return ok(check, expected, f"{reach.distinct} of {reach.asked} peers")


def _wrong_default(check: str, expected: str, wrong: list[RcmdDefault], seen: Proved) -> Result:
    """pdsh's own remote command reaches nobody: which one it is, and what gives it."""
    user = seen.user.name if isinstance(seen.user, User) else "the user"
    one = wrong[0]
    kinds = [each.kind for each in wrong if each.rcmd == one.rcmd]
    shells = f"{' and '.join(kinds)} shell{'s' if len(kinds) > 1 else ''}"
    what = f"pdsh takes {one.rcmd}" if one.rcmd else f"pdsh does not start ({one.said})"
    actual = f"{what} in {user}'s {shells}"
    if one.value is None and not one.set_by:
        # Nothing sets another one: this is how pdsh was built, or Debian's rcmd_default.
        return fixable(
            check, expected, f"{actual}, by default", "", "nodeready deploy INVENTORY --only pdsh"
        )
    given = f": {VARIABLE} is {one.value}" if one.value not in (None, "ssh") else ""
    by = f" by {one.set_by}" if one.set_by else ""
    directory, _, name = one.set_by.rpartition(":")[0].rpartition("/")
    if f"{directory}/{name}" == ENVIRONMENT or (directory == PROFILE_D and beatable(name)):
        fix = "nodeready deploy INVENTORY --only pdsh"
        return fixable(check, expected, f"{actual}{given}{by}", one.set_by, fix)
    fix = f"remove the line {one.set_by}" if one.set_by else ""
    fix = fix or f"{VARIABLE}=ssh in {user}'s start-up files"
    return fail(check, expected, f"{actual}{given}{by}", one.set_by, fix)


# --- Ports: whether a job's processes on different nodes can meet.

#: Milliseconds of a median handshake above which it is slow; see `mesh`.
_SLOW_MS = 100
#: At most so many peers, errors and findings are named.
_MOST = 4
#: EADDRINUSE, in glibc's words and in musl's: another socket has the port.
_HELD = {"Address already in use", "Address in use"}


def _asked(seen: Mesh) -> str:
    """The ports that were tried: ``29500-29510``, ``32 ports of 20000-30000``."""
    span, tried = range_text(seen.first, seen.last), len(seen.listening) + len(seen.busy)
    return span if tried == seen.last - seen.first + 1 else f"{tried} ports of {span}"


def _seen(check: str, seen: Proved) -> Mesh | Result:
    """The node's `Mesh`, or the result when there is none."""
    missing = unseen(check, seen, "mesh")
    if missing is not None:
        return missing
    assert isinstance(seen.mesh, Mesh)
    return seen.mesh


@check(
    "proof.ports",
    proof=MESH,
    fix=("ports.privileged says from where on users may listen; else it is a security module",),
)
def ports(seen: Proved, want: Policy) -> Result:
    """A program can listen on every port of the range, as torchrun's store would.

    Of a range of more than 32 ports, the first, the last and some between are tried. Who holds a
    port, ports.range tells: nothing here ever connects to a listener that is not ours. Ports that
    somebody holds fail only when all are held: one user could stop the jobs of all others, and
    `nodeready env` gives a job a port that is free.
    """
    check = "proof.ports"
    mesh = _seen(check, seen)
    if isinstance(mesh, Result):
        return mesh
    expected = f"{_asked(mesh)} can be listened on"
    if not mesh.busy:
        return ok(check, expected)
    errors: dict[str, list[int]] = {}
    for one in mesh.busy:
        errors.setdefault(one.error, []).append(one.port)
    texts = [f"{folded(numbers)}: {error}" for error, numbers in errors.items()]
    fix = "ports.range names who holds them; wait for that, or give jobs another port_range"
    if any(one.error == "Permission denied" for one in mesh.busy):
        fix = "ports.privileged says from where on users may listen; else it is a security module"
    judged = warn if _HELD.issuperset(errors) and mesh.listening else fail
    return judged(check, expected, "; ".join(texts[:_MOST]), "", fix)


def _who(one: Blocked) -> str:
    """``all 5 peers that tried``, ``3 of 5 peers (gpu001, gpu002, gpu003)``."""
    if len(one.peers) == one.tried:
        return f"all {one.tried} peers"
    return f"{len(one.peers)} of {one.tried} peers ({some(one.peers, ', ', _MOST)})"


def _told(one: Blocked) -> str:
    """One finding in words."""
    if not one.ports:
        if one.kind == "pair":
            return f"to {one.peers[0]}: {one.cause}"
        if one.kind == "target":
            return f"on {_who(one)}: {one.cause}"
        return f"the names of {_who(one)} lead astray: {one.cause}"
    numbers = folded(one.ports)
    if one.kind == "pair":
        told = f"{numbers} of {one.peers[0]} not reached ({one.cause})"
        if one.back is None:
            return told
        return told + ("; the way back works: asymmetric" if one.back else "; nor the way back")
    if one.kind == "both":
        return f"{numbers} neither reached from nor reached at {_who(one)} ({one.cause})"
    if one.kind == "target":
        back = "; its own connections pass: inbound" if one.back else ""
        return f"{numbers} unreachable from {_who(one)} ({one.cause}){back}"
    back = "; it is reached itself: outbound" if one.back else ""
    return f"{numbers} not reached at {_who(one)} ({one.cause}){back}"


@check(
    "proof.mesh",
    proof=MESH,
    fix=(
        "correct /etc/hosts or the name service",
        "see who connects to them: ss -tnp, and run again",
        "look for lost packets (nics.*, nstat TcpRetransSegs) and for the route",
        "the node's address for its name in /etc/hosts, or the GLOO_SOCKET_IFNAME of "
        "`nodeready env`",
        "host names in /etc/hosts or the name service of all nodes, or a MASTER_ADDR that is an "
        "address",
    ),
)
def mesh(seen: Proved, want: Policy) -> Result:
    """The node reaches other nodes, and they reach it, on every port of the range.

    Only listeners that we put there ourselves are connected to. A node is named when at least
    half of its peers fail in one direction; what fails beside that is between two nodes. Between
    nodes of one cluster a handshake takes less than 1 ms: a median above 100 ms is packets that
    are lost and sent again (after 1 s, tcp(7)), or a detour. Who connects to our listeners in a
    loop can keep peers from them: then what those tried tells nothing. A host name that leads a
    job astray is a warning: on the node itself, where gloo takes the address at which its peers
    find it (Debian's 127.0.1.1), and on its peers, to which torchrun gives it as MASTER_ADDR.
    """
    check = "proof.mesh"
    found = _seen(check, seen)
    if isinstance(found, Result):
        return found
    if found.nodes < 2:
        return na(check, "one node alone")
    expected = f"{_asked(found)} open between the nodes"
    if found.blocked:
        more = len(found.blocked) - _MOST
        texts = [_told(one) for one in found.blocked[:_MOST]]
        texts += [f"and {more} more"] if more > 0 else []
        fix = "packet filters here (ports.firewall), on the peers and between them"
        if not any(one.ports for one in found.blocked):
            fix = "correct /etc/hosts or the name service"
        return fail(check, expected, "; ".join(texts), "", fix)
    if found.crowd:
        actual = f"cannot tell who reaches it: {found.crowd} connections of others came meanwhile"
        fix = "see who connects to them: ss -tnp, and run again"
        return warn(check, expected, actual, "", fix)
    if not found.to and not found.by:
        return unknown(check, "no connection was tried in time")
    tried = (
        f"{found.reached} of {found.to} peers reached, reached by {found.reached_by} of {found.by}"
    )
    if not found.reached and not found.reached_by:
        # Of two nodes nobody can tell whose fault it is: neither of them is well.
        return unknown(check, f"{tried}: see what the other nodes say")
    if found.median_ms is not None and found.median_ms > _SLOW_MS:
        actual = (
            f"{tried}, but a handshake takes {found.median_ms:.0f} ms "
            f"(median; to {found.worst_peer} {found.worst_ms:.0f} ms)"
        )
        fix = "look for lost packets (nics.*, nstat TcpRetransSegs) and for the route"
        return warn(check, expected, actual, "", fix)
    return _names(check, expected, found) or ok(check, expected, tried)


def _names(check: str, expected: str, found: Mesh) -> Result | None:
    """The warning where a host name would lead a job astray."""
    if found.own_name:
        actual = f"on the node itself, {found.own_name}: gloo would wait there for its peers"
        fix = "the node's address for its name in /etc/hosts, or the GLOO_SOCKET_IFNAME of "
        return warn(check, expected, actual, "", f"{fix}`nodeready env`")
    if found.names:
        actual = "; ".join(_told(one) for one in found.names[:_MOST])
        fix = (
            "host names in /etc/hosts or the name service of all nodes, or a MASTER_ADDR that is "
        )
        return warn(check, expected, actual, "", f"{fix}an address")
    return None


# --- A collective over all nodes.


@check(
    "proof.collective",
    proof=COLLECTIVE,
    named=True,
    fix=(
        "nodeready smoke INVENTORY --exclude-out FILE looks longer, and writes who is left out",
        "look at what these count with gpus.*, nics.* and rdma.*",
    ),
)
def collective(seen: Proved, want: Policy) -> Result:
    """A collective over all nodes passes, with right results, as `nodeready smoke` makes one.

    It takes minutes and the idle GPUs, so that only its own name asks for it: ``--only
    proof.collective``, and a budget to match (``--budget 300``); ``--only proof`` does not. The
    engine is the best that most nodes have: the job's own PyTorch (policy smoke_python,
    smoke_prefix, smoke_environment), else a plain ring over TCP. A node fails with the evidence
    against it, also when it fails only with one other node, or only in so large a number. What got
    worse on a node that passed (errors of a GPU, of a port) is a warning.
    """
    check, expected = "proof.collective", "all nodes together pass"
    missing = unseen(check, seen, "collective")
    if missing is not None:
        return missing
    assert isinstance(seen.collective, Collective)
    found = seen.collective
    if found.nodes < 2:
        return na(check, "one node alone")
    if found.against:
        fix = (
            "nodeready smoke INVENTORY --exclude-out FILE looks longer, and writes who is left out"
        )
        return fail(check, expected, some(found.against), found.engine, fix)
    if found.untested:
        return (na if found.lacking else unknown)(check, found.untested)
    if found.warnings:
        fix = "look at what these count with gpus.*, nics.* and rdma.*"
        return warn(check, expected, some(found.warnings), found.engine, fix)
    return ok(check, expected, f"{found.engine}: {found.proves}")
