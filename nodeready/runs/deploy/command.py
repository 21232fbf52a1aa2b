"""The run of `nodeready deploy`: probe every node, plan, change, probe again."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace

from nodeready.agent.asking import Answer, Conversation, Request, lock_holder
from nodeready.agent.snapshots import take_snapshot
from nodeready.core import shell
from nodeready.core.exit_codes import Refused
from nodeready.core.outcome import FAILED, HUNG, INTERRUPTED, LOST, OVER, Gap, GapError, Outcome
from nodeready.core.result import ADMIN, ALONE, Result
from nodeready.core.severity import DRIFTS
from nodeready.core.text import counted, sanitise, utc_now
from nodeready.operations import STEPS
from nodeready.runs import targets
from nodeready.runs.deploy.actions import SYSCTL_D, PlanError, StepChange, sysctl_name
from nodeready.runs.deploy.document import (
    Deploy,
    DeployedNode,
    DeployOutcome,
    PlannedAction,
    PlannedChange,
)
from nodeready.runs.options import DeployOptions
from nodeready.runs.targets import Targets, converse, fleet_context, probe_nodes
from nodeready.runs.tell import Tell
from nodeready.subjects.context import FleetContext, Judged, judge_nodes
from nodeready.subjects.debug_tools.facts import PY_SPY_NOTE, RUN
from nodeready.subjects.iommu.facts import DEFAULT_GRUB
from nodeready.subjects.pdsh.facts import ENVIRONMENT
from nodeready.subjects.registry import CHANGED, SUBJECTS, select_whole
from nodeready.subjects.ssh_client.config import MAIN
from nodeready.subjects.ssh_client.facts import KNOWN_HOSTS

# --- A deploy: the changes for each node's failing checks, and their run.
# `plan` is pure. `run_plan` is the conversation with one node: it changes the node and probes it
# again until no change is left.


@dataclass(frozen=True)
class NodePlan:
    """The changes for one node in order, and the steps that could not be planned, with why."""

    changes: tuple[StepChange, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)


def plan(node: Judged, subjects: tuple[str, ...]) -> NodePlan:
    """The plan for a node that was judged. subjects: that may be changed"""
    assert node.snapshot is not None
    changes: list[StepChange] = []
    refused: dict[str, str] = {}
    for step in STEPS:
        if step.subject not in subjects:
            continue
        try:
            change = step.plan(node.snapshot, node.policy, node.fleet, node.results)
        except PlanError as error:
            refused[step.name] = str(error)
            continue
        except Exception as error:  # noqa: BLE001 - an unexpected fact costs only this step
            refused[step.name] = f"internal error: {type(error).__name__}: {error}"
            continue
        if change is not None:
            changes.append(change)
    return NodePlan(tuple(changes), refused)


# --- The run of a plan on one node.

#: Maximum plans of a node, each after a probe. A change can make another one necessary: a package
#: installs a configuration file, or apport resets core_pattern when it stops.
MAX_PASSES = 3
#: The error of nr_lock (sh/change.sh) for a user who is not root.
NOT_ROOT = "not root: add --sudo, or log in as root (-u root)"
#: The end of nr_write's error for a file that another run wrote since the probe: it held the lock.
_CHANGED = "since it was looked at; run again"


@dataclass(frozen=True)
class PlanRun:
    node: Judged  # its latest results
    outcome: DeployOutcome


def run_plan(
    node: Judged, first: NodePlan, run: str, subjects: tuple[str, ...]
) -> Conversation[PlanRun]:
    """The conversation that changes these subjects of a node until its policy's checks pass; a
    failed step does not stop later steps. run: the word for this run in the node's lock
    """
    plan_run, todo = PlanRun(node, DeployOutcome()), first
    for number in range(MAX_PASSES):
        failed = {**plan_run.outcome.failed, **todo.refused}
        plan_run = PlanRun(plan_run.node, replace(plan_run.outcome, failed=failed))
        is_last = number + 1 == MAX_PASSES
        plan_run, touched, may_continue = yield from _make_changes(plan_run, todo, run, is_last)
        if not may_continue:
            return plan_run
        if not touched:
            break
        try:
            snapshot = yield from take_snapshot(node.name, node.policy, touched)
        except GapError as end:
            if end.gap.kind == INTERRUPTED:
                return plan_run
            return replace(plan_run, node=replace(plan_run.node, gap=end.gap))
        assert plan_run.node.snapshot is not None
        merged = plan_run.node.snapshot.merged(snapshot)
        plan_run = replace(plan_run, node=plan_run.node.judged(merged))
        todo = plan(plan_run.node, subjects)
    chosen = (SUBJECTS[subject] for subject in SUBJECTS.keys() & {*subjects})
    repaired = {check.id for subject in chosen for check in subject.checks if check.fixed_by}
    remaining = (r for r in plan_run.node.results if r.fixable and r.check in repaired)
    outcome = replace(plan_run.outcome, unrepaired=tuple(remaining), complete=True)
    return PlanRun(plan_run.node, outcome)


def _make_changes(
    plan_run: PlanRun, todo: NodePlan, run: str, is_last: bool
) -> Generator[Request, Answer, tuple[PlanRun, set[str], bool]]:
    """Make these changes. Returns the run, the touched subjects, and whether to continue."""
    touched: set[str] = set()
    node, outcome = plan_run.node, plan_run.outcome
    for change in todo.changes:
        if change.step in outcome.failed:
            continue
        answer = yield change.request(node.name, run, node.policy.lock_wait_s)
        touched.update(change.touches)
        if answer.gap and answer.gap.kind in OVER:
            if answer.gap.kind != INTERRUPTED:
                # A node that hangs in a change counts as lost.
                kind = LOST if answer.gap.kind == HUNG else answer.gap.kind
                node = replace(node, gap=Gap(kind, f"{answer.gap.reason} in {change.step}"))
            # Each file is replaced completely or left as it was.
            outcome = replace(outcome, interrupted_step=change.step)
            return PlanRun(node, outcome), touched, False
        if not answer.ok and answer.reason().endswith(_CHANGED) and not is_last:
            continue  # The next plan has it.
        if not answer.ok:
            outcome = replace(outcome, failed={**outcome.failed, change.step: answer.reason()})
            if answer.reason() == NOT_ROOT:
                # Every later step would fail with the same error.
                return PlanRun(node, outcome), touched, False
        elif change.step not in outcome.done:
            outcome = replace(outcome, done=(*outcome.done, change.step))
    return PlanRun(node, outcome), touched, True


# --- The run.

_STOPPING = "interrupted: ending what runs on the nodes (again: leave at once)"
#: The conversation that changes one node, and returns it as it is then.
_Change = Callable[[str], Conversation[DeployedNode]]


def run(
    inventory: str,
    options: DeployOptions,
    tell: Tell,
    confirm: Callable[[Deploy], bool | None] = lambda plan: True,
) -> Deploy:
    """Change the nodes until the checks of the chosen subjects pass; with `undo`, take back what
    deploys have changed. Raises Refused.

    confirm: gets the plan; False: nothing is changed; None: the user interrupted
    """
    started, subjects = utc_now(), select_whole(options.only, CHANGED)
    if options.max_fail is not None and options.batch is None:
        raise Refused("--max-fail: is for --batch")

    def document(
        nodes: Iterable[DeployedNode], *, check: bool, complete: bool = True, stopped: str = ""
    ) -> Deploy:
        return Deploy(started, utc_now(), check, subjects, tuple(nodes), complete, stopped)

    targeted = targets.ssh_targets(inventory, options, tell.note)
    with targeted.transport as transport:
        prepare = _plan_undo if options.undo else _plan_nodes
        nodes, change = prepare(targeted, tell, subjects)
        if transport.interrupted:
            return document(nodes.values(), check=options.check, complete=False)
        if options.check:
            return document(nodes.values(), check=True)
        is_confirmed = confirm(document(nodes.values(), check=False))
        if is_confirmed is None:
            return document(nodes.values(), check=False, complete=False)
        if not is_confirmed:
            return document(nodes.values(), check=True)
        stopped = _change_in_waves(targeted, tell, options, nodes, change)
        _remember(targeted, nodes.values())
        complete = not transport.interrupted
        return document(nodes.values(), check=False, complete=complete, stopped=stopped)


def _plan_nodes(
    targeted: Targets, tell: Tell, subjects: tuple[str, ...]
) -> tuple[dict[str, DeployedNode], _Change]:
    """Probe, judge and plan all nodes; and what changes one of them."""
    judged = _judge(targeted, tell, subjects)
    ready = {name: node for name, node in judged.items() if node.snapshot and not node.gap}
    plans = {name: plan(node, subjects) for name, node in ready.items()}
    rows = ((node, plans.get(name, NodePlan())) for name, node in judged.items())
    planned = ((node, DeployedNode.of(node.name, of_node, node.results)) for node, of_node in rows)
    nodes = {node.name: replace(row, gap=node.gap) for node, row in planned}

    def change(name: str) -> Conversation[DeployedNode]:
        done = yield from run_plan(judged[name], plans[name], targeted.transport.run, subjects)
        return _after(nodes[name], done)

    return nodes, change


def _after(node: DeployedNode, done: PlanRun) -> DeployedNode:
    return replace(node, outcome=done.outcome, gap=done.node.gap).judged(done.node.results)


def _judge(nodes: Targets, tell: Tell, subjects: tuple[str, ...]) -> dict[str, Judged]:
    outcomes = probe_nodes(nodes, tell, subjects, on_interrupt=_STOPPING)
    context = FleetContext(nodes.policies)
    if not nodes.transport.interrupted:
        assert nodes.inventory is not None
        context = fleet_context(nodes.transport, nodes.policies, outcomes, nodes.inventory)
    return {node.name: node for node in judge_nodes(outcomes, context)}


# --- The waves of --batch.


def make_waves(names: Sequence[str], batch: float | None, total: int) -> list[Sequence[str]]:
    """The nodes in waves: first one node, the canary, then waves of this size; one without it.

    batch: a number of nodes; a float: a share of `total`

    >>> make_waves(["n1", "n2", "n3", "n4"], 0.5, 4)
    [['n1'], ['n2', 'n3'], ['n4']]
    """
    if batch is None:
        return [names]
    size = batch if isinstance(batch, int) else max(1, round(total * batch * 100) // 100)
    waves = (names[index : index + size] for index in range(1, len(names), size))
    return [names[:1], *waves]


def _change_in_waves(
    targeted: Targets,
    tell: Tell,
    options: DeployOptions,
    nodes: dict[str, DeployedNode],
    change: _Change,
) -> str:
    """Change the nodes that have a plan. Returns why it stopped before the last wave, or ""."""
    from nodeready.fleet.inventory.nodeset import folded

    transport, max_fail = targeted.transport, options.max_fail or 0
    planned = [name for name, node in nodes.items() if node.planned and not node.gap]
    waves = make_waves(planned, options.batch, len(nodes))
    for number, wave in enumerate(waves, 1):
        is_last = number == len(waves)
        activity = "changing" if options.batch is None else f"wave {number} of {len(waves)}"
        outcomes = converse(transport, tell, activity, change, wave, on_interrupt=_STOPPING)
        for name, outcome in outcomes.items():
            nodes[name] = outcome.value or _unchanged(nodes[name], outcome)
        if transport.interrupted:
            for name in planned:
                if nodes[name].outcome is None:
                    nodes[name] = _unchanged(nodes[name])
            break
        failed = sum(nodes[name].failed or bool(nodes[name].gap) for name in planned)
        if not is_last and failed > max_fail:
            place = f"stopped after wave {number} of {len(waves)}"
            return f"{place}: {counted(failed, 'node')} failed, --max-fail is {max_fail}"
        if options.batch is not None and not is_last:
            tell.note(f"{activity}: {folded(wave)} done, {failed} failed in all")
    return ""


def _unchanged(node: DeployedNode, outcome: Outcome[DeployedNode] | None = None) -> DeployedNode:
    """The node after a conversation without a value. outcome: None: it was not begun"""
    gap = None if outcome is None or outcome.is_interrupted else outcome.gap
    return replace(node, gap=gap, outcome=DeployOutcome(failed=node.refused))


# --- --undo: the gate as a deploy with `gate = False`, all else by what the node has kept.
# A change keeps on the node how it was before (nodeready/sh/change.sh, `nr_begin`), but for the
# gate's; nodeready/sh/undo.sh takes it back.

UNDO_TIMEOUT_S = 300  # seconds on a node: GRUB's tool is slow on a busy disk
#: What an earlier release has written, which kept nothing: files with nodeready's name beside
#: those of `Subject.files`, and files with a block.
_OWN = {"debug_tools": (RUN, PY_SPY_NOTE)}
_BLOCKS = {"pdsh": (ENVIRONMENT,), "ssh_client": (KNOWN_HOSTS, MAIN), "iommu": (DEFAULT_GRUB,)}

#: A word of the node -> the kind of the action, and its text.
_UNDO_ACTIONS = {
    "remove": ("remove", "remove {}"),
    "restore": ("change", "restore {}"),
    "block": ("change", "remove nodeready's block from {}"),
    "mode": ("change", "restore {}"),
    "rmdir": ("remove", "remove the directory {} if it is empty"),
    "sysctl": ("run", "set {}"),
    "unit": ("run", "restore the service {}"),
    "run": ("run", "run {}"),
}
_UNDO_LINE = re.compile(r"([a-z0-9_]+\.[a-z0-9_]+) ([a-z]+) (.*)")


@dataclass(frozen=True)
class Undo:
    """What is to be taken back on a node, or was: the changes, what fails, what stays."""

    changes: tuple[PlannedChange, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)  # step -> the reason, one line
    changed_since: tuple[Result, ...] = ()  # files that a person has changed after the deploy


def undo_script(run: str, subjects: Iterable[str], wait_s: int, *, only_look: bool) -> str:
    """The shell text that takes these subjects back, or prints what it would do."""
    chosen = [subject for subject in subjects if subject != "gate"]
    old = []
    for subject in chosen:
        # Two subjects have files in sysctl.d.
        pattern, paths = f"d/*{sysctl_name(subject)[6:-5]}", SUBJECTS[subject].files
        files = [
            p.replace("d/*nodeready*", pattern) if p.startswith(SYSCTL_D) else p for p in paths
        ]
        old += [f"{subject}.files own {path} -" for path in (*files, *_OWN.get(subject, ()))]
        old += [f"{subject}.files file {path} =" for path in _BLOCKS.get(subject, ())]
    lib = "".join(map(shell.library, ("answer", "change", "undo")))
    lib += f"NR_LIB={shell.quote(lib)}\n{shell.library('as_user')}"
    lock = "" if only_look else shell.join(["nr_lock", run, lock_holder(), str(wait_s)])
    words = ["nr_undo", "1" if only_look else "", ",".join(chosen), "\n".join(old)]
    return f"{lib}{lock}\n{shell.join(words)}\n"


def parse_undo(answer: str) -> Undo:
    """The node's answer; other lines are left out."""
    actions: dict[str, list[PlannedAction]] = {}
    diffs: dict[str, list[str]] = {}
    failed: dict[str, str] = {}
    changed: list[Result] = []
    for line in answer.splitlines():
        match = _UNDO_LINE.fullmatch(line)
        if match is None:
            continue
        step, word, text = match[1], match[2], sanitise(match[3])
        if word == "failed":
            failed[step] = text
        elif word == "diff":
            diffs.setdefault(step, []).append(text)
        elif word == "changed":
            changed.append(_changed_since(step, text))
        elif word in _UNDO_ACTIONS:
            kind, words = _UNDO_ACTIONS[word]
            path = text if word in ("remove", "restore", "block", "rmdir") else ""
            action = PlannedAction(kind, words.format(text), path)
            actions.setdefault(step, []).append(action)
    changes = (
        PlannedChange(step, (), tuple(planned), tuple(diffs.get(step, ())))
        for step, planned in actions.items()
    )
    return Undo(tuple(changes), failed, tuple(changed))


def _changed_since(step: str, path: str) -> Result:
    fix = f"keep {path}, or remove it, by hand"
    words = "changed after the deploy: it stays"
    return Result(step, "fail", "", words, path, fix, ADMIN, DRIFTS, ("configure",))


def _plan_undo(
    targeted: Targets, tell: Tell, subjects: tuple[str, ...]
) -> tuple[dict[str, DeployedNode], _Change]:
    """Ask all nodes what can be taken back; and what takes it back on one of them."""
    run = targeted.transport.run
    gates: dict[str, tuple[Judged, NodePlan]] = {}

    def ask(name: str, only_look: bool) -> Conversation[Undo]:
        wait_s = targeted.policies[name].lock_wait_s
        script = undo_script(run, subjects, wait_s, only_look=only_look)
        answer = yield Request(name, script, UNDO_TIMEOUT_S + wait_s, reads=only_look)
        if answer.gap or not answer.ok:
            raise GapError(answer.gap or Gap(FAILED, answer.reason()))
        return parse_undo(answer.stdout)

    def look(name: str) -> Conversation[DeployedNode]:
        node = DeployedNode(name)
        if "gate" in subjects:
            policy = replace(targeted.policies[name], gate=False)
            snapshot = yield from take_snapshot(name, policy, ("gate",))
            judged = Judged(name, policy, ALONE).judged(snapshot)
            gates[name] = judged, plan(judged, ("gate",))
            node = DeployedNode.of(name, gates[name][1], judged.results)
        looked = yield from ask(name, only_look=True)
        changes, refused = (*node.changes, *looked.changes), {**node.refused, **looked.failed}
        node = replace(node, changes=changes, refused=refused)
        return node.judged((*node.for_a_person, *looked.changed_since))

    def change(name: str) -> Conversation[DeployedNode]:
        node, outcome = replace(nodes[name], for_a_person=()), DeployOutcome(complete=True)
        if name in gates:
            done = yield from run_plan(*gates[name], run, ("gate",))
            node, outcome = _after(node, done), done.outcome
            if node.gap or not outcome.complete:
                return node
        try:
            took = yield from ask(name, only_look=False)
        except GapError as end:
            if end.gap.kind != INTERRUPTED:
                raise
            return replace(node, outcome=replace(outcome, interrupted_step="undo", complete=False))
        steps = (*outcome.done, *(change.step for change in took.changes))
        outcome = replace(outcome, done=steps, failed={**outcome.failed, **took.failed})
        return replace(node, outcome=outcome).judged((*node.for_a_person, *took.changed_since))

    outcomes = converse(targeted.transport, tell, "looking", look, on_interrupt=_STOPPING)
    nodes = {name: row.value or DeployedNode(name, row.gap) for name, row in outcomes.items()}
    return nodes, change


def undone(nodes: Iterable[DeployedNode]) -> list[str]:
    """The nodes whose plan was begun, or waited, when the run was interrupted."""
    return [node.name for node in nodes if node.outcome and not node.outcome.complete]


def nodes_to_retry(nodes: Iterable[DeployedNode]) -> list[str]:
    """The nodes that failed, or that were not reached."""
    nodes = list(nodes)
    failed = [node.name for node in nodes if node.failed]
    return failed + [node.name for node in nodes if node.gap and node.gap.is_unreached]


def _remember(targeted: Targets, nodes: Iterable[DeployedNode]) -> None:
    nodes = list(nodes)
    unfinished = undone(nodes) if targeted.transport.interrupted else []
    unfinished += [node.name for node in nodes if node.is_untouched]
    targeted.remember_failed(dict.fromkeys([*unfinished, *nodes_to_retry(nodes)]))
