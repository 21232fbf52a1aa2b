"""The nodes of a run, and the conversations with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nodeready.agent import asking
from nodeready.agent.local import Local
from nodeready.agent.snapshots import PROBE_TIMEOUT_S, Read, SnapshotQuestion, take_snapshot
from nodeready.core.exit_codes import Refused
from nodeready.core.files import user_name
from nodeready.core.outcome import SUDO, NodeGaps, Outcome, failed_nodes, interrupted_nodes
from nodeready.core.policy import FOLDER, Policy, PolicyError
from nodeready.core.text import counted
from nodeready.runs.options import ConnectionOptions, TargetOptions
from nodeready.runs.tell import Tell
from nodeready.runs.user_files import LAST_FAILED, load_failed, refuse_strangers, save_failed
from nodeready.subjects.snapshot import Snapshot

if TYPE_CHECKING:
    from pyinfra.api import Host

    from nodeready.fleet.inventory.load import NodeInventory
    from nodeready.fleet.transport.allocation import JobAllocation
    from nodeready.subjects.context import FleetContext
    from nodeready.subjects.registry import CheckSelection


#: Nodes of one ssh process before a second one is worth its start. An ssh handshake costs 6 ms of
#: a core (benchmarks/HISTORY.md): 256 handshakes take 1.5 s.
NODES_PER_PROCESS = 256
#: From this number of nodes on, ``--via auto`` prefers ClusterShell's tree where it has gateways:
#: the kernel's neighbour table holds 1,024 entries (net.ipv4.neigh.default.gc_thresh3, ip-sysctl),
#: and a process may usually open 1,024 files. Below, ssh is faster and costs this machine less
#: (benchmarks/HISTORY.md, the transports).
MIN_NODES_FOR_TREE = 1024

LOCAL = "@local"  # the inventory of this machine alone: a connector of pyinfra's
_NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})
Note = Callable[[str], None]  # called with a line about the nodes or the transport


@dataclass(frozen=True)
class Targets:
    """The nodes of one command, and their transport, a context manager that disconnects."""

    transport: asking.Transport
    policies: Mapping[str, Policy]  # the policy of each node, by name
    inventory: NodeInventory | None = None  # None: this machine, or all nodes of the job
    # number of the Slurm job in whose steps requests run; "": none, or a new allocation
    job: str = ""
    # these policies as the inventory declares them, where the command has changed them
    declared: Mapping[str, Policy] | None = None

    @property
    def gate_policies(self) -> Mapping[str, Policy]:
        """The policy that each node's own check has to have."""
        return self.policies if self.declared is None else self.declared

    @property
    def slots(self) -> dict[str, int]:
        """Node -> its slots, where the inventory declares them."""
        if self.inventory is None:
            return {}
        data = {name: self.inventory.get_host(name).data for name in self.policies}
        return {name: int(host.slots) for name, host in data.items() if host.get("slots")}

    def at(self, moment: str) -> Targets:
        """The nodes with the site's checks of one of `site_checks.MOMENTS` alone."""
        return self.changed(lambda policy: policy.at(moment))

    def chosen(self, selection: CheckSelection) -> Targets:
        """The nodes with the chosen of the site's checks alone, so that no other runs there."""
        return self.changed(lambda policy: policy.with_site_checks(selection.checks))

    def changed(self, change: Callable[[Policy], Policy]) -> Targets:
        """The nodes with changed policies for this command."""
        shared = {id(policy): change(policy) for policy in self.policies.values()}
        policies = {name: shared[id(policy)] for name, policy in self.policies.items()}
        return replace(self, policies=policies, declared=self.gate_policies)

    def remember_failed(
        self, failed: Iterable[str], *, lost: bool = False, reached: Iterable[str] | None = None
    ) -> None:
        """Keep them for ``--limit @last-failed`` (`save_failed`). reached: None: all targets"""
        if self.inventory is None and not self.job:
            return  # The only node is this machine.
        file = "" if self.inventory is None else self.inventory.file
        names = set(self.policies if reached is None else reached)
        is_whole = self.inventory is not None and len(names) == len(self.inventory)
        save_failed(failed, names, file, is_whole=is_whole, lost=lost)


# --- INVENTORY and --limit.


def load_targets(
    inventory: str, options: ConnectionOptions, note: Note
) -> tuple[NodeInventory, list[Host], dict[str, Policy]]:
    """An INVENTORY, its selected hosts and their policies. No contact. Raises Refused."""
    from pyinfra.api.exceptions import InventoryError

    from nodeready.fleet.inventory.host_data import policies as node_policies
    from nodeready.fleet.inventory.load import load

    data = {"ssh_user": options.ssh_user, "ssh_key": options.ssh_key}
    try:
        set_data = {key: value for key, value in data.items() if value}
        loaded = load(inventory, data=set_data, trusted=options.trust_inventory)
        hosts = list(loaded) if options.limit is None else _limit(loaded, options.limit, note)
        policies = node_policies(loaded, hosts)
    except InventoryError as error:
        raise Refused(str(error)) from None
    except PolicyError as error:
        raise Refused("\n".join(error.problems)) from None
    if loaded.note:
        note(loaded.note)
    return loaded, hosts, policies


def _limit(inventory: NodeInventory, words: str, note: Note) -> list[Host]:
    """The hosts that ``--limit`` selects. Notes failed nodes that are not in the inventory."""
    from nodeready.fleet.inventory.load import select_hosts
    from nodeready.fleet.inventory.nodeset import folded, split

    parts = split(words)
    if LAST_FAILED not in parts:
        return select_hosts(inventory, words)
    failed = load_failed()
    is_only_part = set(parts) == {LAST_FAILED}
    if not failed and is_only_part:
        raise Refused(f"--limit {LAST_FAILED}: no node failed in the last run")
    present = [node.name for node in failed if node.name in inventory.hosts]
    # Nodes of another inventory file are not missing in this one.
    absent = (node for node in failed if node.name not in inventory.hosts)
    missing = [node.name for node in absent if node.inventory in ("", inventory.file)]
    if not present and is_only_part:
        names = folded([node.name for node in failed], 200)
        raise Refused(f"--limit {LAST_FAILED}: not in the inventory: {names}")
    if missing:
        note(f"--limit {LAST_FAILED}: not in the inventory: {folded(missing, 200)}")
    return select_hosts(inventory, words, {LAST_FAILED: present})


# --- The transport.


def ssh_targets(inventory: str, options: ConnectionOptions, note: Note) -> Targets:
    """The nodes of an INVENTORY over ssh, by one process. Raises Refused; contacts no node."""
    from nodeready.fleet.transport.ssh import SshTransport

    loaded, hosts, policies = load_targets(inventory, options, note)
    _refuse_nameless_user(hosts)
    return Targets(SshTransport(loaded, hosts, _pyinfra_config(options)), policies, loaded)


def _declaring() -> list[str]:
    """What of the current directory gives every inventory its data or checks."""
    return [name for name in ("group_data", FOLDER) if os.path.lexists(name)]


def local_policy(options: ConnectionOptions, note: Note) -> Policy:
    """The policy of this machine: that of @local where the current directory has a policy, else
    that of the last deploy. Raises Refused.
    """
    from nodeready.agent.gate import here

    directories = _declaring()
    for name in directories:
        refuse_strangers(name, trusted=options.trust_inventory)
    if directories:
        (policy,) = load_targets("@local", options, note)[2].values()
        return policy

    try:
        return here.load(None)
    except PolicyError as error:
        raise Refused("\n".join(error.problems)) from None


def local_targets(policy: Policy, *, sudo: bool = False) -> Targets:
    """This machine, without a connection. sudo: requests run as root"""
    transport = Local(sudo=sudo)
    return Targets(transport, dict.fromkeys(transport.nodes, policy))


def undeclared_local(inventory: str, options: TargetOptions) -> Targets | None:
    """This machine under the default policy, where it is the inventory and no file or option
    declares more: without pyinfra, whose import takes longer than the look. None: select_targets.
    """
    default = vars(TargetOptions(trust_inventory=options.trust_inventory)).items()
    is_default = default <= vars(options).items()
    if inventory != LOCAL or not is_default or _declaring() or os.path.lexists(LOCAL):
        return None
    return Targets(Local(LOCAL), {LOCAL: Policy()})


def fleet_context(
    transport: asking.Transport,
    declared: Mapping[str, Policy],
    outcomes: Iterable[Outcome[Snapshot]],
    inventory: Iterable[Host] | None,
) -> FleetContext:
    """The context of these snapshots, without the nodes' addresses.

    declared:  the policies of the inventory, which the gate's files have to have
    transport: fetches a block of known hosts that was too large for a snapshot
    inventory: None: this machine alone
    """
    # Imported only here, because they are slow to import.
    from nodeready.fleet.transport import bundle
    from nodeready.subjects.context import context_of
    from nodeready.subjects.ssh_client.known_hosts import READ_BLOCK, Endpoint

    snapshots = {outcome.node: outcome.value for outcome in outcomes if outcome.value is not None}

    def read_block(name: str) -> str:
        request = asking.Request(name, READ_BLOCK, 30)
        return "".join(answer.stdout for _, answer in transport.ask([request]))

    if inventory is None:
        endpoints = {LOCAL: Endpoint(local=True)}
    else:
        from nodeready.fleet.inventory.host_data import endpoint

        endpoints = {host.name: endpoint(host) for host in inventory}
    for name, peer in transport.ssh_peers().items():
        endpoints[name] = endpoints[name]._replace(reached=peer.address, key=peer.key)
    return context_of(declared, snapshots, endpoints, bundle.program, read_block)


def select_targets(
    inventory: str | None,
    options: TargetOptions,
    settings: Mapping[str, Any] = _NO_SETTINGS,
    *,
    job: str | None,
    tell: Note,
    works: bool = False,
) -> Targets:
    """The nodes of a command, with the transport of ``--via``. Raises Refused.

    inventory: None: all nodes of the job, with the default policy
    settings:  fields of the policy that the command line sets for every node
    job:       the running Slurm job in whose steps requests run, by srun; None: not given
    tell:      called with a line about the transport
    works:     requests use the job's GPUs (`fleet.transport.srun.Srun`)
    """
    _refuse_unused_options(inventory, options, job)
    if inventory is None:
        targets = _job_targets(job, options, tell, works)
    else:
        targets = _inventory_targets(inventory, options, job, tell, works)
    return targets.changed(lambda policy: replace(policy, **settings)) if settings else targets


def _inventory_targets(
    inventory: str, options: TargetOptions, job: str | None, tell: Note, works: bool
) -> Targets:
    loaded, hosts, policies = load_targets(inventory, options, tell)
    _refuse_nameless_user(hosts)
    own_job = _own_job(hosts) if job is None and options.via in ("srun", "auto") else ""
    via = _choose_transport(options, hosts, own_job)
    transport: asking.Transport
    if via == "srun":
        transport, number = _srun_transport(list(policies), options, job or own_job, tell, works)
        policies = {name: policies[name] for name in transport.nodes}
        return Targets(transport, policies, loaded, number)
    config = _pyinfra_config(options)
    if via == "clush":
        from nodeready.fleet.transport.clush.transport import Clush

        names = {host.name for host in hosts}
        unselected = [host for host in loaded if host.name not in names]
        topology = options.topology
        transport = Clush(hosts, config, further_hosts=unselected, topology=topology, notify=tell)
    else:
        from nodeready.fleet.transport.ssh import ShardedSsh, SshTransport

        cores = len(os.sched_getaffinity(0))
        count = options.ssh_processes or max(1, min(cores, len(hosts) // NODES_PER_PROCESS))
        transport = (
            SshTransport(loaded, hosts, config)
            if count == 1
            else ShardedSsh(loaded, hosts, config, min(count, len(hosts)))
        )
    return Targets(transport, policies, loaded)


def _refuse_unused_options(inventory: str | None, options: TargetOptions, job: str | None) -> None:
    """Raises Refused for options of a transport that is not used."""
    if job is not None and options.via in ("ssh", "clush"):
        raise Refused("--job: is for --via srun")
    if inventory is None and options.via in ("ssh", "clush"):
        raise Refused(f"--via {options.via}: needs an INVENTORY")
    if inventory is None and options.limit is not None:
        raise Refused("--limit: selects from an INVENTORY, and there is none")
    for name, value, transports in (
        ("--salloc", options.salloc, ("srun", "auto")),
        ("--topology", options.topology, ("clush", "auto")),
        ("--ssh-processes", options.ssh_processes, ("ssh", "auto")),
    ):
        if value is not None and options.via not in transports:
            raise Refused(f"{name}: is for --via {transports[0]}")


def _refuse_nameless_user(hosts: Iterable[Host]) -> None:
    """Raises Refused for a user id without a name (a container's ``-u``).

    ssh refuses it, too: the passwd entry tells ssh where the user's keys are.
    """
    uid = os.getuid()
    if user_name(uid) == f"uid {uid}" and any(not host.name.startswith("@") for host in hosts):
        raise Refused(f"no user has the id {uid}: ssh needs a name for it in /etc/passwd")


def _pyinfra_config(options: ConnectionOptions) -> Any:
    # Imported only here, because the import is slow and --help must be quick.
    from pyinfra.api import Config

    config = Config()
    if options.sudo:
        config.SUDO = True
    return config


def _choose_transport(options: TargetOptions, hosts: list[Host], own_job: str) -> str:
    """The value of ``--via``, or what ``auto`` chooses for these nodes.

    srun inside of a job that has all nodes; ClusterShell's tree for many nodes, where it has
    gateways; else ssh.
    """
    if options.via != "auto":
        return options.via
    if options.salloc is not None or own_job:
        return "srun"
    if len(hosts) >= MIN_NODES_FOR_TREE or options.topology is not None:
        from nodeready.fleet.transport.clush.gateway import has_gateways

        if has_gateways([host.name for host in hosts], options.topology):
            return "clush"
    return "ssh"


# --- Slurm.


def _own_job(hosts: Iterable[Host]) -> str:
    """Number of this process's Slurm job, if the job has all of these nodes; else ""."""
    from pyinfra.api.exceptions import InventoryError

    from nodeready.fleet.inventory import slurm

    number, nodelist = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_JOB_NODELIST")
    if not number or not nodelist:
        return ""
    try:
        job_nodes = {*slurm.job_nodes(nodelist)}
    except InventoryError:
        return ""
    return number if {host.name for host in hosts} <= job_nodes else ""


def running_job(job: str) -> JobAllocation:
    """The running job of ``--job``. Raises Refused."""
    from nodeready.fleet.transport.allocation import running

    return running(job)


def targets_of_ended_job(
    inventory: str | None, options: TargetOptions, job: str | None, tell: Tell
) -> Targets:
    """The nodes of INVENTORY. With --via srun, inside the job only while the job runs: a job with
    cores, or with failures, has often ended.
    """
    srun_job = job if options.via == "srun" else None
    if srun_job is not None and inventory is not None:
        try:
            running_job(srun_job)
        except Refused as refused:
            tell.note(f"{refused.message}; the nodes are asked in a new allocation")
            srun_job = None
    return select_targets(inventory, options, job=srun_job, tell=tell.note)


def _job_targets(job: str | None, options: TargetOptions, tell: Note, works: bool) -> Targets:
    """All nodes of a running job, with the default policy."""
    from nodeready.fleet.transport.srun import Srun

    if job is None:
        raise Refused("--via srun: name a job with --job ID, or give an INVENTORY")
    if options.salloc is not None:
        raise Refused("--salloc: the job has its nodes already")
    running = running_job(job)
    transport = Srun(running, tell, works=works, sudo=options.sudo)
    return Targets(transport, dict.fromkeys(transport.nodes, Policy()), job=running.number)


def _srun_transport(
    names: Sequence[str], options: TargetOptions, job: str, tell: Note, works: bool
) -> tuple[asking.Transport, str]:
    """Steps on the nodes that the job has, too; its number. job: "": a new allocation"""
    from nodeready.fleet.transport.srun import OwnJob, Srun

    if not job:
        return OwnJob(names, options.salloc or "", tell, works=works, sudo=options.sudo), ""
    if options.salloc is not None:
        raise Refused("--salloc: the job has its nodes already")
    running = running_job(job)
    job_nodes = {*running.nodes}
    shared = [name for name in names if name in job_nodes]
    if not shared:
        raise Refused(f"--job {job}: has none of the nodes of INVENTORY")
    missing = len(names) - len(shared)
    if missing:
        tell(f"job {running.number} has {len(shared)} of these nodes; {missing} are not asked")
    return Srun(running.of(shared), tell, works=works, sudo=options.sudo), running.number


# --- Conversations with many nodes: progress for the user, one question for sudo's password.


def converse(
    transport: asking.Transport,
    tell: Tell,
    activity: str,
    conversation: Callable[[str], asking.Conversation[asking.ResultT]],
    names: Iterable[str] | None = None,
    *,
    on_interrupt: str = "",
) -> dict[str, Outcome[asking.ResultT]]:
    """Hold a conversation with each node, with progress; ask once for sudo's password.

    activity:     the word beside the progress
    names:        of the nodes; None: all
    on_interrupt: the line that is printed once after an interrupt
    """
    outcomes: dict[str, Outcome[asking.ResultT]] = {}
    is_announced = False

    def converse_with(chosen: list[str]) -> None:
        with tell.progress(activity, chosen) as done:

            def on_outcome(key: asking.Key, outcome: Outcome[asking.ResultT]) -> None:
                nonlocal is_announced
                if transport.interrupted and on_interrupt and not is_announced:
                    is_announced = True
                    tell.say(on_interrupt)
                done(asking.node_of(key), outcome.gap is not None)

            conversations: dict[asking.Key, asking.Conversation[asking.ResultT]] = {
                name: conversation(name) for name in chosen
            }
            for key, outcome in asking.collect(transport, conversations, on_outcome).items():
                outcomes[asking.node_of(key)] = outcome

    converse_with(list(transport.nodes if names is None else names))
    gaps = {name: outcome.gap for name, outcome in outcomes.items() if outcome.gap}
    refused = [name for name, gap in gaps.items() if gap.kind == SUDO]
    if refused and not transport.interrupted and ask_password(transport, refused, tell):
        converse_with(refused)
    return outcomes


def keep_gaps(
    targets: Targets,
    tell: Tell,
    gaps: NodeGaps,
    *,
    complete: bool = True,
    further: Iterable[str] = (),
) -> None:
    """Keep nodes without an answer, and further ones, for @last-failed; tell of an interrupt."""
    interrupted = dict.fromkeys(interrupted_nodes(gaps))
    if not complete:
        tell.say_partial(interrupted)
    reached = [name for name in targets.policies if name not in interrupted]
    targets.remember_failed([*failed_nodes(gaps), *further], lost=True, reached=reached)


def ask_password(transport: asking.Transport, names: list[str], tell: Tell) -> bool:
    """Ask the user for sudo's password on these nodes. Returns whether the user gave one."""
    password = tell.ask_password(f"sudo password ({counted(len(names), 'node')}): ")
    if password is None:
        return False
    transport.use_password(password, names)
    return True


def ask_with_progress(transport: asking.Transport, tell: Tell) -> asking.Asks:
    """The function that asks each node one question, with progress and sudo's password."""

    def ask(activity: str, requests: Mapping[str, asking.Request]) -> Mapping[str, asking.Answer]:
        outcomes = converse(
            transport, tell, activity, lambda name: asking.once(requests[name]), requests
        )
        return {name: asking.answer_of(outcome) for name, outcome in outcomes.items()}

    return ask


def probe_nodes(
    targets: Targets,
    tell: Tell,
    subjects: Iterable[str] | None = None,
    limit_s: int = PROBE_TIMEOUT_S,
    on_interrupt: str = "",
    *,
    names: Iterable[str] | None = None,
    read: Read = SnapshotQuestion.read,
) -> list[Outcome[Snapshot]]:
    """Probe the nodes. subjects: None: all; names, on_interrupt: as for `converse`"""
    chosen = None if subjects is None else tuple(subjects)
    transport, policies = targets.transport, targets.policies

    def conversation(name: str) -> asking.Conversation[Snapshot]:
        return take_snapshot(name, policies[name], chosen, limit_s, read, nonce=transport.nonce)

    outcomes = converse(transport, tell, "probing", conversation, names, on_interrupt=on_interrupt)
    return list(outcomes.values())
