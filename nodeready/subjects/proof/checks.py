"""The checks of what was proved by acting, as one subject; first those between the nodes."""

from __future__ import annotations

from nodeready.core import result
from nodeready.core.base import grouped
from nodeready.core.own_files import beatable
from nodeready.core.policy import Policy
from nodeready.core.result import Check, Result, check, deploy, join_first, join_names
from nodeready.core.severity import LEMONS, loses_job
from nodeready.core.shell import quote
from nodeready.core.text import range_text
from nodeready.subjects.pdsh.checks import MODULE_FIX
from nodeready.subjects.pdsh.facts import ENVIRONMENT, PROFILE_D, VARIABLE
from nodeready.subjects.ports.checks import ports_text
from nodeready.subjects.proof import active, debugging, facts, session
from nodeready.subjects.proof.facts import Proved
from nodeready.subjects.proof.session import DEPLOY_ONLY, proof_check, without_proof
from nodeready.subjects.ssh_client import checks
from nodeready.subjects.ssh_client.checks import CAUSES

# --- Whether the job's user gets from node to node without prompts, by ssh and pdsh.

_ALONE = "no other node to try"
_CLIENT_FIX = "install OpenSSH's client"
_SHELL_FIX = "log in by ssh with a command and see what the user's shell makes of it"
_PDSHRC_FIX = "look for exit in ~/.pdshrc"
_NAMESAKES_FIX = "correct the addresses of these names, in the DNS or in /etc/hosts"


@check("proof.ssh", loses_job("deploy", "install"), proof="peers", settings=("job_user",),
       expects="logs in to its peers, and they to it",
       fix=(_CLIENT_FIX, deploy(f"{DEPLOY_ONLY} ssh_client")))  # fmt: skip
def ssh(observed: Proved, policy: Policy) -> Result:
    """The job's user logs in from this node to others and back by ssh, without being asked.

    A launcher (pdsh, mpirun, DeepSpeed) hangs at the first question. Each login is a user's
    ordinary login, with the user's keys and configuration, and must end at the host that
    was asked for. A node that fails with several peers is reported once; the peers are excused.
    """
    reach = observed.reach if isinstance(observed.reach, facts.Reach) else None
    # Peers may have seen what is wrong with a node that gave no answer itself.
    if reach is None or not reach.ssh:
        for field in ("peers", "reach"):
            if missing := without_proof(ssh, observed, field):
                return missing
    elif isinstance(observed.user, facts.User) and observed.user.error:
        return ssh.na("no session: see proof.user")
    if isinstance(observed.peers, facts.Peers) and not observed.peers.ssh_installed:
        return ssh.fail("no ssh that the user can run (see ssh_client.installed)", fix=_CLIENT_FIX)
    assert reach is not None
    if not reach.to and not reach.by and not reach.ssh:
        return ssh.na(_ALONE)
    if not reach.ssh:
        excused = f"; {', '.join(reach.excused)}: see there" if reach.excused else ""
        worked = reach.to - len(reach.excused)
        return ssh.ok(f"{worked} of {reach.to} peers{excused}")
    account = observed.user
    user = account.name if isinstance(account, facts.User) else policy.job_user or "the user"
    actual = "; ".join(_trouble_text(trouble, user) for trouble in reach.ssh)
    first = reach.ssh[0]
    if CAUSES[first.cause].deploy:
        source, fix = checks.offending(first.message), f"{DEPLOY_ONLY} ssh_client"
        return ssh.fixable(actual, source, fix)
    fix = CAUSES[first.cause].fix.format(user=user, file=quote(checks.named_file(first.message)))
    return ssh.fail(actual, checks.message_source(first.message), fix)


def _trouble_text(trouble: facts.Trouble, user: str) -> str:
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


@check("proof.pdsh", loses_job("deploy", "configure", "install"), proof="peers",
       settings=("packages",), fix=(
    deploy(f"{DEPLOY_ONLY} debug_tools"),
    MODULE_FIX,
    "pdsh -R ssh -w NAME true",
    deploy(f"{DEPLOY_ONLY} pdsh"),
    "remove the line WHERE",
    "PDSH_RCMD_TYPE=ssh in NAME's start-up files",
    _SHELL_FIX,
    _PDSHRC_FIX,
    _NAMESAKES_FIX,
))  # fmt: skip
def pdsh(observed: Proved, policy: Policy) -> Result:
    """pdsh brings a separate answer from every peer that ssh reaches, and the peers' from it.

    Its exit status tells nothing (0 for a refused connection), so the answers are counted. It is
    run as the user would: with the default remote command of the user's login shell and of an
    interactive one. A remote command other than ssh fails when it brings no answer; rsh is not
    tried. A ~/.pdshrc, which commands over pdsh read first, does not end them.
    """
    peers, reach = observed.peers, observed.reach
    if isinstance(reach, facts.Reach) and reach.pdsh_by:
        actual = f"does not answer the pdsh of {join_names(reach.pdsh_by)} as itself"
        return pdsh.fail(actual, fix=_SHELL_FIX, expected="an answer to every peer")
    for field in ("peers", "reach"):
        if missing := without_proof(pdsh, observed, field):
            return missing
    assert isinstance(peers, facts.Peers)
    assert isinstance(reach, facts.Reach)
    check = pdsh.expecting("an answer from every peer")
    if not peers.pdsh_installed:
        if "pdsh" not in policy.packages:
            return check.na("pdsh is neither installed nor in the policy's packages")
        return check.fixable("pdsh is not installed", fix=f"{DEPLOY_ONLY} debug_tools")
    if not reach.pdsh_targets:
        return check.na("ssh reaches no peer: see proof.ssh" if reach.to else _ALONE)
    if reach.pdsh_said and len(reach.missing) == reach.pdsh_targets:
        without_module = "No such rcmd module" in reach.pdsh_said
        fix = MODULE_FIX if without_module else "pdsh -R ssh -w NODE true"
        return check.fail(f"no answer: {reach.pdsh_said}", fix=fix)
    if broken := [d for d in peers.defaults if not d.works and (d.rcmd or d.messages)]:
        return _wrong_default(check, broken, observed.user_name)
    if reach.missing:
        lost = ", ".join(f"{peer.name} ({peer.message or 'silent'})" for peer in reach.missing)
        actual = f"{len(reach.missing)} of {reach.pdsh_targets} peers did not answer: {lost}"
        return check.fail(actual, fix=f"pdsh -R ssh -w {quote(reach.missing[0].name)} true")
    if reach.same:
        pairs = "; ".join(f"{' and '.join(same.names)} say {same.answer}" for same in reach.same)
        actual = f"{reach.pdsh_targets} peers, host names: {reach.distinct}: {pairs}"
        return check.fail(actual, fix=_NAMESAKES_FIX)
    if peers.pdshrc:
        actual = f"no command behind `. ~/.pdshrc` runs: {peers.pdshrc}"
        return check.fail(actual, "~/.pdshrc", _PDSHRC_FIX)
    return check.ok(f"{reach.distinct} of {reach.pdsh_targets} peers")


def _wrong_default(check: Check, broken: list[facts.RcmdDefault], user: str) -> Result:
    first = broken[0]
    kinds = [default.kind for default in broken if default.rcmd == first.rcmd]
    shells = f"{' and '.join(kinds)} shell{'s' if len(kinds) > 1 else ''}"
    failure = f"takes {first.rcmd}" if first.rcmd else f"does not start ({first.messages})"
    actual = f"pdsh {failure} in {user}'s {shells}"
    deploy_fix = f"{DEPLOY_ONLY} pdsh"
    if first.value is None and not first.set_by:
        # No file sets the remote command: this is how pdsh was built, or Debian's rcmd_default.
        return check.fixable(f"{actual}, by default", "", deploy_fix)
    actual += f": {VARIABLE} is {first.value}" if first.value not in (None, "ssh") else ""
    actual += f" by {first.set_by}" if first.set_by else ""
    path = first.set_by.rpartition(":")[0]
    directory, _, name = path.rpartition("/")
    if path == ENVIRONMENT or (directory == PROFILE_D and beatable(name)):
        return check.fixable(actual, first.set_by, deploy_fix)
    fix = f"remove the line {first.set_by}"
    fix = fix if first.set_by else f"{VARIABLE}=ssh in {user}'s start-up files"
    return check.fail(actual, first.set_by, fix)


# --- Whether a job's processes on different nodes can connect on the job's ports.

#: Milliseconds of a median handshake above which it is slow; see `mesh`.
_SLOW_MS = 100
#: EADDRINUSE, in glibc's words and in musl's: another socket has the port.
_HELD = {"Address already in use", "Address in use"}

_PERMISSION_FIX = (
    "ports.privileged says from where on users may listen; else it is a security module"
)
_ADDRESS_FIX = "correct /etc/hosts or the name service"
_CROWD_FIX = "see who connects to them: ss -tnp, and run again"
_SLOW_FIX = "look for lost packets (nics.*, nstat TcpRetransSegs) and for the route"
_OWN_NAME_FIX = (
    "the node's address for its name in /etc/hosts, or the GLOO_SOCKET_IFNAME of `nodeready env`"
)
_NAMES_FIX = (
    "host names in /etc/hosts or the name service of all nodes, or a MASTER_ADDR that is an "
    "address"
)


def _tried_ports(observed: facts.Mesh) -> str:
    """The ports that were tried: ``29500-29510``, ``32 ports of 20000-30000``."""
    span = range_text(observed.first, observed.last)
    tried = len(observed.listening) + len(observed.busy)
    return span if tried == observed.last - observed.first + 1 else f"{tried} ports of {span}"


@proof_check("proof.ports", loses_job("configure"), facts.MESH, fix=(_PERMISSION_FIX,))
def ports(check: Check, mesh: facts.Mesh, observed: Proved, policy: Policy) -> Result:
    """A program can listen on every port of the range, as torchrun's store would.

    In a range of more than 32 ports, the first, the last and some between are tried. ports.range
    names who holds a port: nothing here ever connects to a listener that is not ours. Held ports
    fail only when all are held: else one user could stop every other user's job, and
    `nodeready env` gives a job a free port.
    """
    check = check.expecting(f"{_tried_ports(mesh)} can be listened on")
    if not mesh.busy:
        return check.ok()
    errors = grouped((port.error, port.port) for port in mesh.busy)
    texts = [f"{ports_text(numbers)}: {error}" for error, numbers in errors.items()]
    fix = "ports.range names who holds them; wait for that, or give jobs another port_range"
    if "Permission denied" in errors:
        fix = _PERMISSION_FIX
    judge = check.warn if _HELD.issuperset(errors) and mesh.listening else check.fail
    return judge("; ".join(texts[:4]), "", fix)


def _peers_text(blocked: facts.Blocked) -> str:
    """``all 5 peers that tried``, ``3 of 5 peers (gpu001, gpu002, gpu003)``."""
    if len(blocked.peers) == blocked.tried:
        return f"all {blocked.tried} peers"
    return f"{len(blocked.peers)} of {blocked.tried} peers ({join_names(blocked.peers)})"


def _blocked_text(blocked: facts.Blocked) -> str:
    if not blocked.ports:
        if blocked.kind == "pair":
            return f"to {blocked.peers[0]}: {blocked.cause}"
        if blocked.kind == "target":
            return f"on {_peers_text(blocked)}: {blocked.cause}"
        return f"the names of {_peers_text(blocked)} lead astray: {blocked.cause}"
    numbers = ports_text(blocked.ports)
    if blocked.kind == "pair":
        back = "; the way back works: asymmetric" if blocked.back else "; nor the way back"
        back = "" if blocked.back is None else back
        return f"{numbers} of {blocked.peers[0]} not reached ({blocked.cause}){back}"
    peers = f"{_peers_text(blocked)} ({blocked.cause})"
    if blocked.kind == "both":
        return f"{numbers} neither reached from nor reached at {peers}"
    if blocked.kind == "target":
        back = "; its own connections pass: inbound" if blocked.back else ""
        return f"{numbers} unreachable from {peers}{back}"
    back = "; it is reached itself: outbound" if blocked.back else ""
    return f"{numbers} not reached at {peers}{back}"


@proof_check("proof.mesh", loses_job("inspect", "clean_up", "configure"), facts.MESH,
             fix=(_ADDRESS_FIX, _CROWD_FIX, _SLOW_FIX, _OWN_NAME_FIX, _NAMES_FIX))  # fmt: skip
def mesh(check: Check, reach: facts.Mesh, observed: Proved, policy: Policy) -> Result:
    """The node reaches other nodes, and they reach it, on every port of the range.

    Only nodeready's own listeners are connected to. A node is named when at least half of its
    peers fail in one direction; any other failure is between two nodes. Between nodes of one
    cluster a handshake takes less than 1 ms: a median above 100 ms means lost packets that are
    sent again (after 1 s, tcp(7)), or a detour. A program that connects to our listeners in a loop
    can keep peers from them: then the peers' attempts prove nothing. A host name with a wrong
    address is a warning: on the node itself, where gloo takes the address at which its peers find
    it (Debian's 127.0.1.1), and on its peers, to which torchrun gives it as MASTER_ADDR.
    """
    if reach.nodes < 2:
        return check.na("one node alone")
    check = check.expecting(f"{_tried_ports(reach)} open between the nodes")
    if reach.blocked:
        fix = "packet filters here (nft list ruleset), on the peers and between them"
        if not any(blocked.ports for blocked in reach.blocked):
            fix = _ADDRESS_FIX
        return check.fail(join_first(map(_blocked_text, reach.blocked)), "", fix)
    if reach.crowd:
        actual = f"cannot tell who reaches it: {reach.crowd} foreign connections came meanwhile"
        return check.warn(actual, "", _CROWD_FIX)
    if not reach.to and not reach.by:
        return check.unknown("no connection was tried in time")
    tried = f"{reach.reached} of {reach.to} peers reached"
    tried += f", reached by {reach.reached_by} of {reach.by}"
    if not reach.reached and not reach.reached_by:
        # With two nodes, either can be at fault.
        return check.unknown(f"{tried}: see what the other nodes say")
    if reach.median_ms is not None and reach.median_ms > _SLOW_MS:
        worst = f"(median; to {reach.worst_peer} {reach.worst_ms:.0f} ms)"
        actual = f"{tried}, but a handshake takes {reach.median_ms:.0f} ms {worst}"
        return check.warn(actual, "", _SLOW_FIX)
    if reach.own_name:
        actual = f"on the node itself, {reach.own_name}: gloo would wait there for its peers"
        return check.warn(actual, "", _OWN_NAME_FIX)
    if reach.names:
        return check.warn("; ".join(map(_blocked_text, reach.names[:4])), "", _NAMES_FIX)
    return check.ok(tried)


# --- A collective over all nodes, and the node's earlier failures.

_SMOKE_FIX = (
    "nodeready smoke INVENTORY --exclude-out FILE looks longer, and writes who is left out"
)
_COUNTERS_FIX = "look at what these count with gpus.*, nics.* and rdma.*"


@proof_check("proof.collective", loses_job("inspect"), facts.COLLECTIVE, opt_in=True,
             expects="all nodes together pass", fix=(_SMOKE_FIX, _COUNTERS_FIX))  # fmt: skip
def collective(
    check: Check, result: facts.ProvedCollective, observed: Proved, policy: Policy
) -> Result:
    """A collective over all nodes passes, with right results, as `nodeready smoke` makes one.

    It takes minutes and the idle GPUs, so it runs only by its full name, ``--only
    proof.collective``, with a budget to match (``--budget 300``). The engine is the best that most
    nodes have: the job's own PyTorch (policy smoke_python, smoke_prefix, smoke_environment), else
    plain TCP between pairs of nodes. A node fails with the evidence against it, also when it fails
    only with one other node, or only together with several, and if NCCL chose another network
    there than the policy's nccl_network. A slower network than on most nodes, and new errors of a
    GPU or a port on a node that passed, are a warning.
    """
    if result.nodes < 2:
        return check.na("one node alone")
    if result.against:
        return check.fail(join_first(result.against), result.engine, _SMOKE_FIX)
    if result.untested:
        return (check.na if result.lacking else check.unknown)(result.untested)
    if result.warnings:
        return check.warn(join_first(result.warnings), result.engine, _COUNTERS_FIX)
    network = f", network {result.network}" if result.network else ""
    return check.ok(f"{result.engine}{network}: {result.proves}")


@check(
    "proof.history",
    loses_job("inspect", "replace", source=LEMONS),
    settings=("lemon_nodes",),
    proof=facts.HISTORY,
    fix="nodeready lemons shows the evidence: replace the node or the GPU; after a repair, waive "
    "proof.history for the node until its old failures are forgotten",
    expects="fails no more often than its peers",
)
def history(observed: Proved, policy: Policy) -> Result:
    """The node and its GPUs did not fail far more often than their peers in the last 90 days.

    The looks that this machine has kept are read (`nodeready lemons`). A node that passes today
    and failed on many days is the likeliest to end the next job: three of 63 nodes caused more
    than half of all exclusions in one fleet (arXiv 2605.09370). A GPU is known by its serial
    number, and its earlier nodes count when it fails here, too. It is `na` where no look was
    kept, and on the node itself.
    """
    if policy.lemon_nodes == "ignore":
        return history.na("the policy ignores it (lemon_nodes)")
    if not isinstance(observed.history, facts.ProvedHistory):
        return history.na("not proved")
    if not observed.history.lemons:
        return history.ok()
    actual = join_first(observed.history.lemons)
    judge = history.fail if policy.lemon_nodes == "fail" else history.warn
    return judge(actual, "the memory of earlier looks")


#: In the order of the reports.
_CHECKS = (
    session.user, session.limits, debugging.attach, debugging.attach_nonblocking,
    debugging.attach_native, debugging.gdb, debugging.strace, debugging.core, debugging.backtrace,
    session.resources, ssh, pdsh, ports, mesh, collective, history, active.diagnostic,
    active.bandwidth, active.nvlink_errors, active.rdma_bandwidth,
)  # fmt: skip

SUBJECT = result.Subject(
    "proof", "The session in which the proofs ran: whose it is, and its limits.", checks=_CHECKS,
    kinds=result.FactKinds(
        # The proofs act: their results are compared.
        volatile="""
            user limits attach control logins ssh shell login step tracers core resources peers
            reach mesh collective history diagnostic bandwidth rdma_bandwidth
        """
    ),
)  # fmt: skip
