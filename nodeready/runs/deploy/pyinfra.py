"""The snapshots of a pyinfra run: one round trip per node, shared by all operations and facts.

For `pyinfra INVENTORY deploy.py`. pyinfra connects to the hosts and calls each operation for each
host, first to prepare and again to execute. The first call probes all nodes in parallel. After an
operation that changed a node, only the subjects that it touches are probed again. A fact of one
node probes that node alone, and only in what was not probed yet.

The settings of a call come from its arguments, the inventory's data and the defaults of the
`@deploy` around it. A node is judged once for each policy that this gives; it is probed again only
in the subjects whose probes depend on the difference.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import WRAPPER_ASSIGNMENTS
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

from gevent.lock import BoundedSemaphore
from pyinfra import host, logger
from pyinfra.api import Host, State, StringCommand, operation
from pyinfra.api.arguments import all_argument_meta
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.output import format_text

from nodeready.agent.asking import Conversation, Key, collect
from nodeready.agent.local import with_sudo
from nodeready.agent.snapshots import snapshot_question, take_snapshot
from nodeready.core import shell
from nodeready.core.base import Unknown
from nodeready.core.outcome import Outcome
from nodeready.core.policy import Policy, PolicyError, key_text
from nodeready.core.result import ALONE, FleetFacts, Result, fix_text, result_text
from nodeready.core.settings import closest_word, value_text
from nodeready.core.text import sanitise
from nodeready.fleet.inventory import host_data
from nodeready.fleet.transport.ssh import ConnectedHosts
from nodeready.runs.deploy.actions import Action, PlanError, RemoveFile, StepChange, WriteFile
from nodeready.runs.targets import fleet_context
from nodeready.subjects.context import FleetContext, Judged
from nodeready.subjects.registry import CHANGED, SUBJECTS
from nodeready.subjects.snapshot import Snapshot, differently_probed, judge

_COLOURS = {"-": "red", "+": "green"}  # the colours of the lines of a difference
#: Settings that can be compared and hashed: name, checked value.
_Settings = tuple[tuple[str, Any], ...]


class CallSettings(NamedTuple):
    """The settings of one call of an operation that the inventory does not have."""

    # those of the @deploy around the call: for what the inventory leaves open
    defaults: _Settings = ()
    # the call's arguments, and what the deploy file assigned to host.data
    overrides: _Settings = ()

    def policy(self, declared: Mapping[str, Any]) -> Policy:
        """declared: the inventory's settings for the node"""
        return Policy(**{**dict(self.defaults), **declared, **dict(self.overrides)})


def call_settings(
    host: Host,
    operation: str,
    setting_names: Iterable[str],
    arguments: Mapping[str, Any],
    words: Iterable[Any] = (),
) -> CallSettings:
    """The checked settings of a call on this host.

    setting_names: the settings that the operation takes as arguments
    words: positional arguments, which are refused
    Raises PyinfraError, in one line, for a wrong setting, also one of the inventory.
    """
    place = ""
    try:
        _run(host)
        place = _deploy_line(host.state)
        for word in words:
            text = f"{value_text(word)} has no name: {_names_of(setting_names)}"
            raise PolicyError([f"{operation}: {text}"])
        for key in arguments:
            if key not in setting_names:
                close = closest_word(key, setting_names)
                advice = f"did you mean {close}?" if close else _names_of(setting_names)
                raise PolicyError([f"{operation}: unknown setting {key_text(key)}: {advice}"])
        deploy = f"data_defaults of the deploy {host.current_deploy_name}"
        defaults = _checked(host.get_deploy_data(), deploy)
        overrides = {**host.data.override_datas, **arguments}
        return CallSettings(defaults, _checked(overrides, operation))
    except PolicyError as error:
        # pyinfra prints its own exceptions as one line, any other as a traceback.
        raise PyinfraError(f"{place}{error}") from None


def _deploy_line(state: State) -> str:
    """``deploy.py:3: ``, the line of the deploy file that pyinfra runs; "": it runs none."""
    frame = sys._getframe() if state.current_exec_filename else None
    while frame is not None:
        if frame.f_code.co_filename == state.current_exec_filename:
            return f"{state.current_exec_filename}:{frame.f_lineno}: "
        frame = frame.f_back
    return ""


def _checked(data: Mapping[str, Any], source: str) -> _Settings:
    return tuple(sorted(host_data.checked_data(data, source).items())) if data else ()


def _names_of(setting_names: Iterable[str]) -> str:
    words = ", ".join(setting_names)
    return f"the settings are {words}" if words else "it takes no setting"


@dataclass
class _PyinfraRun:
    transport: ConnectedHosts
    settings: dict[str, dict[str, Any]]  # each node's settings in the inventory
    # the first probes of each node, by its policy in the inventory
    outcomes: dict[str, Outcome[Snapshot]] = field(default_factory=dict)
    # settings of a call -> node -> its policy then
    policies: dict[CallSettings, dict[str, Policy]] = field(default_factory=dict)
    # settings of a call, subjects -> the context of the fleet
    contexts: dict[tuple[CallSettings, tuple[str, ...]], FleetContext] = field(
        default_factory=dict
    )
    # node -> policy -> the node with its latest results
    nodes: dict[str, dict[Policy, Judged]] = field(default_factory=dict)
    # node -> policy -> the subjects that were changed since its last probe
    stale: dict[str, dict[Policy, set[str]]] = field(default_factory=dict)
    # (node, line) that were printed: pyinfra calls an operation to prepare and to execute
    warnings: set[tuple[str, str]] = field(default_factory=set)
    # pyinfra runs a deploy file for all nodes at once. The first call probes while the rest wait.
    lock: BoundedSemaphore = field(default_factory=BoundedSemaphore)

    def policies_of(self, call: CallSettings) -> dict[str, Policy]:
        """Node -> its policy in such a call; nodes with the same settings share one."""
        if call not in self.policies:
            self.policies[call] = host_data.share_policies(self.settings, call.policy)
        return self.policies[call]

    def context(self, call: CallSettings, state: State, subjects: tuple[str, ...]) -> FleetContext:
        """The context with this call's settings for all nodes, probed for these subjects."""
        with self.lock:
            if (call, subjects) not in self.contexts:
                self._probe_all(state, subjects)
                outcomes, policies = self.outcomes.values(), self.policies_of(call)
                context = fleet_context(self.transport, policies, outcomes, state.inventory)
                addresses = host_data.addresses_of_nodes(outcomes, self.transport.ssh_peers())
                self.contexts[call, subjects] = replace(context, addresses=addresses)
            return self.contexts[call, subjects]

    def _probe_all(self, state: State, subjects: Iterable[str]) -> None:
        """Probe all nodes in parallel, by the inventory's settings, where that was not done."""
        hosts = list(state.inventory.get_active_hosts())
        policies = self.policies_of(CallSettings())
        due = {str(host.name): self._missing(str(host.name), subjects) for host in hosts}
        conversations: dict[Key, Conversation[Snapshot]] = {
            name: take_snapshot(name, policies[name], missing)
            for name, missing in due.items()
            if missing
        }
        for outcome in collect(self.transport, conversations).values():
            before, snapshot = self.outcomes.get(outcome.node), outcome.value
            if before and before.value and snapshot:
                snapshot = before.value.merged(snapshot)
            self.outcomes[outcome.node] = replace(outcome, value=snapshot)

    def _missing(self, name: str, subjects: Iterable[str]) -> set[str]:
        """Those of the subjects that were not probed. A node that failed is not asked again."""
        outcome = self.outcomes.get(name)
        if outcome is None:
            return {*subjects}
        return {*subjects} - outcome.value.subjects.keys() if outcome.value else set()

    def judged(
        self, host: Host, call: CallSettings, subjects: tuple[str, ...] = CHANGED
    ) -> Judged:
        """The node with its results, of these subjects at least, under the settings of a call."""
        name, context = str(host.name), self.context(call, host.state, subjects)
        policy = context.policies[name]
        nodes, stale = self.nodes.setdefault(name, {}), self.stale.setdefault(name, {})
        if policy not in nodes:
            policy_before, snapshot = self._latest(name, subjects)
            different = differently_probed(policy_before, policy, snapshot.subjects)
            stale[policy] = {*stale.get(policy_before, ()), *different}
            nodes[policy] = Judged(name, policy, context.about(name)).judged(snapshot)
        observed = nodes[policy].snapshot
        assert observed is not None
        if missing := {*subjects} - observed.subjects.keys():
            first_policy, snapshot = self._first(name, subjects)
            different = differently_probed(first_policy, policy, missing)
            stale.setdefault(policy, set()).update(different)
            node = replace(nodes[policy], fleet=context.about(name))
            nodes[policy] = node.judged(snapshot.merged(observed))
        if self.transport.adopt_sudo(host):
            # Root sees more: what other users may not read was not observed, or not complete.
            stale.update({judged_by: {*observed.subjects, *subjects} for judged_by in nodes})
        if due := stale.pop(policy, None):
            probe = snapshot_question(name, policy, due)
            for _, answer in self.transport.ask([probe.request]):
                latest = nodes[policy].snapshot
                assert latest is not None
                nodes[policy] = nodes[policy].judged(latest.merged(probe.read(answer)))
        return nodes[policy]

    def observed(self, host: Host, subjects: Iterable[str]) -> Snapshot:
        """The node's snapshot with these subjects, by its policy in the inventory."""
        name = str(host.name)
        policy = self.policies_of(CallSettings())[name]
        policy_before, snapshot = self._latest(name, ())
        stale = self.stale.get(name, {}).get(policy_before, set())
        different = differently_probed(policy_before, policy, subjects)
        due = ({*subjects} - snapshot.subjects.keys()) | (stale & {*subjects}) | {*different}
        if not due:
            return snapshot
        probe = snapshot_question(name, policy, due)
        ((_, answer),) = self.transport.ask([probe.request])
        snapshot = snapshot.merged(probe.read(answer))
        if name not in self.nodes:
            self.outcomes[name] = Outcome(name, snapshot)
        elif policy_before == policy:
            self.nodes[name][policy] = self.nodes[name][policy].judged(snapshot)
            stale -= due
        return snapshot

    def _latest(self, name: str, subjects: Iterable[str]) -> tuple[Policy, Snapshot]:
        """The latest snapshot of a node, and the policy by which it was probed."""
        for node in reversed(self.nodes.get(name, {}).values()):
            assert node.snapshot is not None
            return node.policy, node.snapshot
        return self._first(name, subjects)

    def _first(self, name: str, subjects: Iterable[str]) -> tuple[Policy, Snapshot]:
        """The snapshot by the inventory's policy, or the node's failure; and that policy."""
        policy, outcome = self.policies_of(CallSettings())[name], self.outcomes.get(name)
        if outcome is None:
            return policy, Snapshot()
        probe = snapshot_question(name, policy, subjects)
        return policy, outcome.value or probe.all_unknown(outcome.reason)


# pyinfra passes an operation only its host. So the snapshots are kept here for the next operation,
# by the State of the host. A pyinfra run has one State; the snapshots are freed with it.
_runs: WeakKeyDictionary[State, _PyinfraRun] = WeakKeyDictionary()


def _run(host: Host) -> _PyinfraRun:
    """The run of this host. Raises PolicyError for a wrong setting of the inventory."""
    state = host.state
    if state not in _runs:
        settings = host_data.declared_settings(state.inventory, list(state.inventory))
        _runs[state] = _PyinfraRun(ConnectedHosts(state.inventory, secrets.token_hex(6)), settings)
    return _runs[state]


def judged(host: Host, call: CallSettings, subjects: tuple[str, ...] = CHANGED) -> Judged:
    """The node with its results, of these subjects at least. Stale ones are probed again."""
    return _run(host).judged(host, call, subjects)


def policies_of(host: Host, call: CallSettings) -> Collection[Policy]:
    """The policies of the run's nodes under the settings of a call."""
    return _run(host).policies_of(call).values()


def observed(host: Host, subjects: Iterable[str]) -> Snapshot:
    """The node's snapshot with these subjects. Raises PyinfraError for a wrong setting."""
    try:
        return _run(host).observed(host, tuple(subjects))
    except PolicyError as error:
        raise PyinfraError(str(error)) from None


def command(host: Host, change: StepChange, wait_s: int) -> StringCommand:
    """The command that makes a change on the node.

    pyinfra itself would put sudo's password into the command line, which every user of the node
    can read. So these commands read the password from the first line of their standard input.

    wait_s: seconds to wait for another deploy on the node
    """
    transport = _run(host).transport
    request = change.request(host.name, transport.run, wait_s)
    # One line of ASCII: pyinfra sends text.
    script, payload = request.script, request.payload or ""
    line, stdin = shell.command(script, request.limit_s, transport.tag, payload)
    words: dict[str, Any] = {}
    if password := _sudo_password(host):
        line, stdin = with_sudo(line, password), f"{password}\n{stdin}"
        words = {"_sudo": False, "_sudo_password": ""}
    if request.payload:
        # A refused change leaves its input unread. For pyinfra, a pipe that closes meanwhile is a
        # broken connection: without this it would not print the reason.
        line += " || { nr=$?; cat >/dev/null; exit $nr; }"
    return StringCommand(line, _stdin=stdin, **words)


def _sudo_password(host: Host) -> str:
    """The password for sudo to root in the current operation, or ""."""
    arguments = cast("dict[str, Any]", host.current_op_global_arguments or {})
    if not arguments.get("_sudo") or arguments.get("_sudo_user"):
        return ""
    prompted = host.connector_data.get("prompted_sudo_password")
    return str(arguments.get("_sudo_password") or prompted or "")


def refuse(reason: str) -> StringCommand:
    """A command that fails with this reason: pyinfra then counts the node as failed."""
    return StringCommand(f"echo {shell.quote('nodeready: ' + reason)} >&2; exit 1")


def warn(host: Host, results: Iterable[Result]) -> None:
    """Print what a person has to repair on the node: a line for each result, once in a run."""
    warnings, name = _run(host).warnings, str(host.name)
    for result in results:
        fix = fix_text(result)
        text = f"{result.status} {result.check}: {result_text(result)}"
        text = sanitise(f"{text}; fix: {fix}" if fix else text)
        if (name, text) not in warnings:
            warnings.add((name, text))
            host.log(text, logger.warning)


def show_differences(host: Host, change: StepChange) -> None:
    """Print the differences of the files that this change writes, as pyinfra's --diff does."""
    for action in change.actions:
        if not isinstance(action, WriteFile | RemoveFile):
            continue
        host.log(f"{change.step} will {action.describe()}")
        for line in action.diff().splitlines():
            logger.info("  %s", format_text(line, _COLOURS.get(line[:1])))


def forget(host: Host, touched: Iterable[str]) -> None:
    """Mark these subjects of the node as changed, so that they are probed again before use."""
    run, name = _run(host), str(host.name)
    for policy in run.nodes[name]:
        run.stale[name].setdefault(policy, set()).update(touched)


# --- A step: an operation that yields actions when one of its checks fails.
# A step is written as a generator of actions. ``@step`` turns it into a pyinfra operation, for
# ``pyinfra INVENTORY deploy.py``, that also has ``plan``, for ``nodeready deploy``. ``plan``
# decides for both: a step acts exactly when one of its checks fails and nodeready may repair it.
# As an operation, a step takes the settings that decide it as keyword arguments, beside the
# arguments that pyinfra gives every operation: ``ptrace.scope(ptrace_scope=1, _sudo=True)``.

#: (snapshot, policy) -> actions; with the fleet as third argument where the step needs it.
MakeActions = Callable[..., Iterator[Action]]


def own_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call without those that pyinfra gives every operation."""
    return {key: value for key, value in arguments.items() if key not in all_argument_meta}


@dataclass(frozen=True)
class DeployStep:
    """One operation: a callable for deploy.py, with the plan that ``nodeready deploy`` runs."""

    name: str  # ``subject.noun``
    fixes: tuple[str, ...]  # ids of the checks that it makes pass
    # the fields of Policy that decide it, in the order of Policy: its arguments
    settings: tuple[str, ...]
    make_actions: MakeActions  # the generator function that ``@step`` decorates
    touches: tuple[str, ...]  # the subjects that it makes stale
    timeout_s: int  # limit of the whole change on the node
    needs_fleet: bool  # ``make_actions`` has the fleet as third argument
    operation: Any  # the pyinfra operation

    def __post_init__(self) -> None:
        # pyinfra's command, and its other operations, take an operation by the attributes of a
        # function: its name, its docstring, `_inner`.
        vars(self).update(vars(self.operation))
        vars(self).update({name: getattr(self.operation, name) for name in WRAPPER_ASSIGNMENTS})

    @property
    def subject(self) -> str:
        return self.name.partition(".")[0]

    @property
    def does(self) -> str:
        """What the step does: the first paragraph of its docstring."""
        return " ".join((self.make_actions.__doc__ or "").split("\n\n")[0].split())

    def actions(
        self, snapshot: Snapshot, policy: Policy, fleet: FleetFacts = ALONE
    ) -> tuple[Action, ...]:
        """The actions for a node on which a check of the step fails."""
        if self.needs_fleet:
            return tuple(self.make_actions(snapshot, policy, fleet))
        return tuple(self.make_actions(snapshot, policy))

    def plan(
        self,
        snapshot: Snapshot,
        policy: Policy,
        fleet: FleetFacts = ALONE,
        results: Iterable[Result] | None = None,
    ) -> StepChange | None:
        """The change; None: none, or nothing observed. results: None: judge the snapshot"""
        if isinstance(snapshot.subjects.get(self.subject, Unknown("")), Unknown):
            return None
        if results is None:
            results = judge(snapshot, policy, fleet, (self.subject,))
        failing = tuple(r.check for r in results if r.check in self.fixes and r.fixable)
        if not failing:
            return None
        actions = self.actions(snapshot, policy, fleet)
        return StepChange(self.name, failing, actions, self.touches, self.timeout_s)

    def __call__(self, *words: Any, **arguments: Any) -> Any:
        """Call the pyinfra operation. arguments: settings, and pyinfra's own"""
        # pyinfra runs the operation later, once per host: a mistake has to end the run before.
        own_settings = own_arguments(arguments)
        call_settings(host, self.name, self.settings, own_settings, words)
        return self.operation(**arguments)


def step(
    touches: Iterable[str] = (),
    timeout_s: int = 60,
    *,
    settings: Iterable[str] = (),
    needs_fleet: bool = False,
) -> Callable[[MakeActions], DeployStep]:
    """A decorator that makes a DeployStep of a generator function of actions.

    The step's name is ``subject.function``. The module of operations that has the function names
    the subject. The step fixes the checks of its subject that have this name as ``fixed_by``.
    Raises ValueError if no check has.

    settings: the fields of Policy that only the actions read, and no check that it fixes
    """

    def wrap(make_actions: MakeActions) -> DeployStep:
        subject = make_actions.__module__.rpartition(".")[2]
        name = f"{subject}.{make_actions.__name__}"
        checks = SUBJECTS[subject].checks if subject in SUBJECTS else ()
        fixed = [check for check in checks if check.fixed_by == name]
        if not fixed:
            raise ValueError(f"no check of {subject} in subjects/registry.py is fixed by {name}")
        # No operation repairs some checks of the subject: each of its operations warns of them.
        warned_checks = {check.id for check in checks if check.fixed_by in ("", name)}
        deciding = {*settings, *(key for check in fixed for key in check.settings)}
        setting_names = tuple(field.name for field in fields(Policy) if field.name in deciding)

        def run(**arguments: Any) -> Generator[StringCommand, None, None]:
            call = call_settings(host, name, setting_names, arguments)
            node = judged(host, call)
            assert node.snapshot is not None
            observation = node.snapshot[subject]
            if isinstance(observation, Unknown):
                yield refuse(f"{subject} could not be observed: {observation.reason}")
                return
            rows = (row for row in node.results if row.check in warned_checks and row.bad)
            warn(host, (row for row in rows if not row.fixable))
            try:
                change = deploy_step.plan(node.snapshot, node.policy, node.fleet, node.results)
            except PlanError as error:
                yield refuse(f"{name}: {error}")
                return
            if change is None:
                host.noop(f"{name} is as the policy wants it")
                return
            if host.state.config.DIFF:
                show_differences(host, change)
            yield command(host, change, node.policy.lock_wait_s)
            forget(host, change.touches)

        run.__name__ = make_actions.__name__
        # pyinfra shows an operation as MODULE.NAME.
        run.__module__ = f"{make_actions.__module__.rpartition('.')[0]}.{subject}"
        run.__doc__ = make_actions.__doc__
        fixes, subjects = tuple(check.id for check in fixed), (subject, *touches)
        how = setting_names, make_actions, subjects, timeout_s, needs_fleet
        deploy_step = DeployStep(name, fixes, *how, operation=operation()(run))
        return deploy_step

    return wrap
