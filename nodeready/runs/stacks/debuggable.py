"""Whether a running job can be debugged when it hangs or dies: what is there, and what is not.

Pure: from traces that were taken with ``stacks --check`` (`nodeready.agent.stacks.ask_witnesses`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from nodeready.agent.stacks import ask_witnesses
from nodeready.agent.stacks.ask_witnesses import RECORDER_ON, Settings, buffer_variable, release
from nodeready.agent.stacks.ranks import CLAIMS
from nodeready.agent.witnesses.nccl_ras import SAFE
from nodeready.agent.witnesses.software import numbers
from nodeready.core import wire
from nodeready.core.json_types import MomentOrEmpty
from nodeready.core.outcome import Gap, NodeGaps, gaps_code, node_gaps
from nodeready.runs.stacks.document import STACKS_FAILURES
from nodeready.runs.stacks.evidence import Evidence, RankPlace
from nodeready.runs.stacks.trace import Trace, TracedProcess
from nodeready.runs.stacks.witness_reader import judge_environments

#: Items in the order of the report: py-spy reads the stack; the output is in a file; the flight
#: recorder is on; it can write its dump; NCCL's RAS port may be asked; a core would be written;
#: Python prints its stacks when it dies; a core of the GPU can be requested; NCCL logs failures;
#: no variable keeps its ranks apart.
ITEMS = (
    "stack", "log", "recorder", "dump", "ras", "core", "faulthandler", "gpu-core", "nccl-log",
    "environment",
)  # fmt: skip
#: ok, or it does not apply; warn: some evidence is missing; fail: a hang or a death leaves too
#: little evidence; unknown: not readable.
RESULTS = ("fail", "unknown", "warn", "ok")


@dataclass(frozen=True)
class DebugFinding:
    """One item, with the ranks that share its result."""

    JSON_KEYS: ClassVar = {"observation": "found"}

    item: Annotated[str, {"enum": ITEMS}]
    result: Annotated[str, {"enum": RESULTS}]
    observation: str  # what was observed, one line
    fix: str  # what to do for the next run; "": nothing
    ranks: tuple[Annotated[int, {"minimum": 0}], ...] = ()  # () where they are not known
    nodes: tuple[str, ...] = ()
    processes: Annotated[int, {"minimum": 1}] = 1


@dataclass(frozen=True)
class Debuggable:
    """The document of `nodeready stacks --check`. Text is one line without control characters."""

    SCHEMA: ClassVar = "debuggable"
    VERSION: ClassVar = 2
    JSON: ClassVar = ("started", "finished", "job", "complete", "findings", "gaps")

    started: MomentOrEmpty  # when the capture began, UTC
    finished: MomentOrEmpty  # when it ended, UTC
    job: str  # the job; empty: not known, or several
    findings: tuple[DebugFinding, ...]  # by item, the worst of each first
    gaps: NodeGaps  # the nodes that gave no answer
    complete: bool = True  # False when it was interrupted


def debuggable_code(document: Debuggable) -> int:
    """The exit code: 3 if an item fails, or is not readable."""
    return gaps_code(
        document.gaps,
        complete=document.complete,
        usage=not document.findings and not document.gaps,
        check=any(finding.result in ("fail", "unknown") for finding in document.findings),
        failures=STACKS_FAILURES,
    )


#: Result, observation, what to do: as of a DebugFinding.
Judged = tuple[str, str, str]
_UNSEEN_RESULT: Judged = ("unknown", "it could not be seen", "look as its user, or with --sudo")
_ENV_ADVICE = "nodeready env --debug exports it"

# --- The results of one process.


def _stack(process: TracedProcess) -> Judged:
    samples = process.samples
    if any(sample.main is not None for sample in samples):
        return "ok", "py-spy reads it", ""
    reason = next((sample.error for sample in samples if sample.error), "there is no sample")
    fix = "nodeready audit says what forbids it (ptrace.scope, debug_tools.py_spy)"
    return "fail", str(reason)[:200], "" if "not installed" in reason else fix


def _log(process: TracedProcess) -> Judged:
    log = process.witnesses.get("logs")
    if not isinstance(log, dict):
        return _UNSEEN_RESULT
    if log.get("path") and not log.get("absent"):
        return "ok", "its output is in a file", ""
    reason = str(log.get("absent") or "its output is in no file")[:200]
    if reason.startswith("srun takes its output"):
        # Perhaps to a file: only srun knows.
        return "ok", reason, ""
    return "fail", reason, "torchrun --log-dir DIR --tee 3, or srun --output FILE"


def _is_off(value: str) -> bool:
    """Whether the value of a variable means "off"."""
    return value.strip().lower() in ("0", "false", "off", "no", "n", "f")


def _recorder(settings: Settings) -> Judged:
    torch, variables = release(settings.torch), dict(settings.variables)
    if not settings.torch:
        return "ok", "no PyTorch is loaded", ""
    if settings.nccl is None:
        return "ok", "no NCCL is loaded: nothing dumps its records", ""
    if torch is not None and torch < ask_witnesses.RECORDER:
        return "warn", f"PyTorch {settings.torch} has none", "PyTorch 2.2 or newer"
    size = variables.get("TORCH_FR_BUFFER_SIZE", variables.get("TORCH_NCCL_TRACE_BUFFER_SIZE"))
    if size is not None and (not size.strip().isdecimal() or int(size[:9]) == 0):
        return "fail", f"it is off: {buffer_variable(torch)}={size}", _ENV_ADVICE
    if size is None and (torch is None or torch < RECORDER_ON):
        reason = f"PyTorch {settings.torch} may have it off: {buffer_variable(torch)} is not set"
        return "fail", reason, _ENV_ADVICE
    dump = variables.get("TORCH_NCCL_DUMP_ON_TIMEOUT")
    if (dump is not None and _is_off(dump)) or (dump is None and (torch or (0, 0)) < RECORDER_ON):
        return "fail", "it dumps nothing on a timeout: TORCH_NCCL_DUMP_ON_TIMEOUT", _ENV_ADVICE
    return "ok", "it is on", ""


def _dump(settings: Settings) -> Judged:
    if not settings.torch or settings.nccl is None:
        return "ok", "nothing dumps its records", ""
    if not settings.dump_place:
        return "unknown", "its rank is not known, and so not its file", "start it with RANK"
    if settings.dump_wrong:
        fix = "a directory that its user can write to: nodeready env --debug --directory DIR"
        return "fail", f"{settings.dump_place}: {settings.dump_wrong}", fix
    return "ok", f"its dump can be written to {settings.dump_place}RANK", ""


def _ras(settings: Settings) -> Judged:
    version, variables = settings.nccl, dict(settings.variables)
    if version is None:
        return "ok", "no NCCL is loaded", ""
    release_numbers = numbers(version)
    safe = ".".join(map(str, SAFE))
    if release_numbers is None:
        return "unknown", "the version of NCCL is not known", ""
    if release_numbers < (2, 24):
        return "warn", f"NCCL {version} has no RAS port", f"NCCL {safe} or newer"
    if _is_off(variables.get("NCCL_RAS_ENABLE", "1")):
        return "warn", "it is off: NCCL_RAS_ENABLE=0", "take NCCL_RAS_ENABLE out"
    if release_numbers < SAFE:
        problem = f"asking NCCL {version} has crashed jobs: it is not asked"
        return "warn", problem, f"NCCL {safe} or newer"
    return "ok", f"NCCL {version}: its port may be asked, unless a communicator is made", ""


def _core(settings: Settings) -> Judged:
    limit, pattern = settings.core_bytes, settings.core_place
    if limit is None:
        return _UNSEEN_RESULT
    if settings.core_wrong:
        fix = "nodeready deploy sets a place for cores (core_dumps)"
        return "fail", f"{pattern or 'no core'}: {settings.core_wrong}", fix
    if limit == 0 and not (pattern.startswith("|") and "systemd-coredump" not in pattern):
        fix = "ulimit -c unlimited in the job's script; nodeready deploy lifts the limit"
        return "fail", "the limit of its cores is 0", fix
    if 0 < limit < 1 << 30:
        return "warn", f"its cores are cut off at {limit >> 20} MiB", "ulimit -c unlimited"
    place = "" if pattern.startswith(("/", "|")) else " in its working directory"
    return "ok", f"a core would go to {pattern}{place}", ""


#: Item, its variable, what is lost without it; the library that it belongs to.
_VARIABLES = (
    ("faulthandler", "PYTHONFAULTHANDLER", "a death by a signal leaves no stack of Python's", ""),
    ("gpu-core", "CUDA_ENABLE_USER_TRIGGERED_COREDUMP", "a kernel that hangs cannot be looked at",
     "CUDA"),
    ("nccl-log", "NCCL_DEBUG", "NCCL does not say what fails", "NCCL"),
)  # fmt: skip


def _variables(settings: Settings) -> Iterator[tuple[str, Judged]]:
    is_loaded = {"": True, "CUDA": settings.cuda, "NCCL": settings.nccl is not None}
    for item, name, loss, library in _VARIABLES:
        value = dict(settings.variables).get(name, "")
        if not is_loaded[library]:
            yield item, ("ok", f"no {library} is loaded", "")
        elif value.strip() and not _is_off(value):
            yield item, ("ok", f"{name}={value}", "")
        else:
            yield item, ("warn", f"{loss}: {name} is not set", _ENV_ADVICE)


def _judged(process: TracedProcess) -> Iterator[tuple[str, Judged]]:
    yield "stack", _stack(process)
    yield "log", _log(process)
    try:
        settings = wire.decode(Settings, process.witnesses.get("settings"))
    except wire.DecodeError:
        yield from ((item, _UNSEEN_RESULT) for item in ITEMS[2:-1])
        return
    yield "recorder", _recorder(settings)
    yield "dump", _dump(settings)
    yield "ras", _ras(settings)
    yield "core", _core(settings)
    yield from _variables(settings)


def _judge_environment(
    evidence: Evidence, places: Sequence[RankPlace]
) -> Iterator[tuple[RankPlace, Judged]]:
    judged_by_rank: dict[int | None, list[Judged]] = {}
    for finding in judge_environments(evidence, places):
        result = "fail" if finding.weight > 1 else "warn"
        for rank in finding.ranks:
            row = result, finding.text, finding.advice
            judged_by_rank.setdefault(rank, []).append(row)
    for place in places:
        read = evidence.environments.get((place.node, place.pid))
        if read is None or read.absent:
            yield place, _UNSEEN_RESULT
            continue
        for judged in judged_by_rank.get(place.rank, [_NO_FINDING]):
            yield place, judged


_NO_FINDING: Judged = ("ok", "no variable is known to keep its ranks apart", "")


def judge(
    traces: Iterable[Trace],
    gaps: Mapping[str, Gap],
    *,
    started: str = "",
    finished: str = "",
    complete: bool = True,
) -> Debuggable:
    """How the job of these traces can be debugged. gaps: complete after all traces are read."""
    places_of: dict[tuple[str, Judged], list[tuple[int | None, str]]] = {}
    jobs: dict[str, None] = {}
    evidence, places = Evidence(), list[RankPlace]()
    for trace in traces:
        for process in trace.processes:
            if process.note.startswith(CLAIMS):
                continue
            jobs.setdefault(process.job)
            for item, judged in _judged(process):
                places_of.setdefault((item, judged), []).append((process.rank, trace.node))
            identity = (process.pid, process.rank, process.local_rank)
            places.append(RankPlace(trace.node, *identity))
        evidence.read(trace)
    for place, judged in _judge_environment(evidence, places):
        places_of.setdefault(("environment", judged), []).append((place.rank, place.node))
    findings = [
        DebugFinding(
            item,
            *judged,
            tuple(sorted({rank for rank, _ in processes if rank is not None})),
            tuple(dict.fromkeys(node for _, node in processes)),
            len(processes),
        )
        for (item, judged), processes in places_of.items()
    ]
    findings.sort(key=lambda f: (ITEMS.index(f.item), RESULTS.index(f.result), f.ranks[:1]))
    job = next(iter(jobs), "") if len(jobs) == 1 else ""
    return Debuggable(started, finished, job, tuple(findings), node_gaps(gaps), complete)
