"""The run of `nodeready env`: the variables for a job, from the nodes' facts."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nodeready.agent import run as rank_supervisor
from nodeready.agent.asking import Request, new_nonce
from nodeready.agent.stacks.ask_witnesses import RECORDER, RECORDER_ON, RECORDER_RENAMED, release
from nodeready.core import shell
from nodeready.core.outcome import gaps_of
from nodeready.core.result import FleetFacts
from nodeready.core.text import utc_now
from nodeready.fleet.inventory.host_data import addresses_of_nodes
from nodeready.fleet.inventory.nodeset import fold
from nodeready.runs import targets
from nodeready.runs.options import EnvOptions
from nodeready.runs.ready import job_env
from nodeready.runs.ready.job_env import JobVariable, NodesByValue, nodes_by_reason
from nodeready.runs.targets import Targets, ask_with_progress, keep_gaps, probe_nodes
from nodeready.runs.tell import Tell
from nodeready.runs.values import policy_settings

# --- The variables that make a job debuggable, with the names of the installed PyTorch. Pure.


@dataclass(frozen=True)
class InstalledTorch:
    torch: str = ""  # its version; "": not known
    cuda: bool | None = None  # it was built for NVIDIA's GPUs; None: not known
    reason: str = ""  # why the version is not known; "": it is known
    nccl: str = ""  # the version of NCCL's package; "": not known


# Without importing torch, which takes seconds: version.py in its directory has the version.
_ASK = f"""
from __future__ import annotations
import importlib.util, os, sys
from contextlib import suppress
{inspect.getsource(rank_supervisor.torch_versions)}
spec = importlib.util.find_spec("torch")
if spec is None or not spec.submodule_search_locations:
    sys.exit("no torch")
for name, value in torch_versions(list(spec.submodule_search_locations)[0]).items():
    print(sys.argv[1], name.strip("_"), value)
"""
ASK_S = 20  # seconds on a node: a Python on a file system that many nodes read at once


def question(python: str, nonce: str) -> str:
    """The POSIX sh text that asks this Python for its torch; root runs only root's Python."""
    return f"""
    nr_python=$(command -v {shell.quote(python)}) || {{
        printf '%s why there is no %s\\n' {shell.quote(nonce)} {shell.quote(python)}
        exit 0
    }}
    nr_owner=$(stat -Lc %u -- "$nr_python")
    if [ "$(id -u)" = 0 ] && [ "$nr_owner" != 0 ]; then
        printf '%s why root does not run %s, which is not root\\047s\\n' \
            {shell.quote(nonce)} {shell.quote(python)}
        exit 0
    fi
    cd /
    timeout -k 2 {ASK_S} "$nr_python" -B -c {shell.quote(_ASK)} {shell.quote(nonce)} 2>/dev/null ||
        printf '%s why %s finds no torch\\n' {shell.quote(nonce)} {shell.quote(python)}
    """


def read_installed(output: str, nonce: str) -> InstalledTorch:
    """The PyTorch in a node's answer; lines without the nonce are ignored."""
    values: dict[str, str] = {}
    for row in output.splitlines():
        mark, _, tail = row.partition(" ")
        name, _, value = tail.partition(" ")
        if mark == nonce:
            values.setdefault(name, value.strip()[:200])
    torch = values.get("version", "none")
    if release(torch) is None:
        return InstalledTorch(reason=values.get("why") or "its version of torch is unknown")
    return InstalledTorch(torch, values.get("cuda", "none") != "none", "", values.get("nccl", ""))


#: The size of the records and the files for them: the names before `RECORDER_RENAMED`, and since.
_BUFFERS = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE")
_FILES = ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE")
_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_LOCAL = "/dev/shm"  # the directory of pipes: on the node itself, and in every distribution


def _recorder(
    installed: InstalledTorch, directory: str, word: str
) -> Iterable[tuple[str, str, str]]:
    """(name, value, reason) of the flight recorder's variables."""
    torch = release(installed.torch)
    if torch is not None and torch < RECORDER:
        return
    names = slice(0, 2)
    if torch is not None:
        names = slice(1, 2) if torch >= RECORDER_RENAMED else slice(0, 1)
    note = "" if torch else " (both names: the version of torch is not known)"
    # Newer versions keep records by default.
    if torch is None or torch < RECORDER_ON:
        for name in _BUFFERS[names]:
            reason = "the flight recorder keeps the last 2,000 collectives of each rank"
            yield name, "2000", reason + note
        reason = "when a collective times out, each rank writes its records"
        yield "TORCH_NCCL_DUMP_ON_TIMEOUT", "1", reason
    for name in _FILES[names] if directory else ():
        value = f"{directory.rstrip('/')}/comm_lib_trace_rank_"
        yield name, value, f"where each rank writes its records{note}"
    reason = "nodeready stacks --dump has a rank write its records, and the job goes on"
    yield _PIPE, f"{_LOCAL}/nodeready-{word}-", reason


def _debugging(installed: InstalledTorch, directory: str, word: str) -> dict[str, tuple[str, str]]:
    rows = _recorder(installed, directory, word)
    by_name = {name: (value, reason) for name, value, reason in rows}
    by_name["NCCL_DEBUG"] = ("WARN", "NCCL logs failures only")
    if installed.cuda is not False:
        reason = "the core of a GPU whose kernel hangs can be asked for"
        by_name["CUDA_ENABLE_USER_TRIGGERED_COREDUMP"] = ("1", reason)
        pipe = f"{_LOCAL}/nodeready-{word}-cuda.%h.%p"
        by_name["CUDA_COREDUMP_PIPE"] = (pipe, "a write to this pipe makes that core")
        reason = "that core is without the memory of the GPU, which may be 80 GB and more"
        by_name["CUDA_COREDUMP_GENERATION_FLAGS"] = ("skip_global_memory", reason)
    reason = "a rank that dies by a signal prints the stacks of Python"
    by_name["PYTHONFAULTHANDLER"] = ("1", reason)
    reason = "what a rank printed last is in its log, not in its memory"
    by_name["PYTHONUNBUFFERED"] = ("1", reason)
    return by_name


def _synchronous(installed: InstalledTorch) -> dict[str, tuple[str, str]]:
    reason = "each launch waits for its kernel: the stack of a GPU's error is the right one"
    variables = rank_supervisor.sync_variables(installed.cuda)
    return {name: (value, reason) for name, value in variables.items()}


def debug_variables(
    installed: Mapping[str, InstalledTorch],
    directory: str = "",
    word: str = "",
    *,
    debug: bool = True,
    sync_cuda: bool = False,
) -> tuple[JobVariable, ...]:
    """The variables that make a job on these nodes debuggable, each with its reason.

    installed: node -> its PyTorch, at least one
    directory: where the ranks write their records; "": PyTorch's default
    word:      a part of the pipes' names; "": a random word, so that no such file exists before
    debug:     those that leave evidence
    sync_cuda: those that make each launch wait for its kernel, unless NCCL would hang with them

    Where the version of PyTorch is unknown, both names of a variable are exported: a version
    ignores the name that it does not know.
    """
    word = word or os.urandom(4).hex()
    suggested = {
        node: (_debugging(on_node, directory, word) if debug else {})
        | (_synchronous(on_node) if sync_cuda else {})
        for node, on_node in installed.items()
    }
    names = dict.fromkeys(name for by_name in suggested.values() for name in by_name)
    unknown = nodes_by_reason({n: torch.reason for n, torch in installed.items() if torch.reason})
    on_cuda = {node: on_node for node, on_node in installed.items() if on_node.cuda is not False}
    sync_hazards = {n: rank_supervisor.sync_hazard(o.torch, o.nccl) for n, o in on_cuda.items()}
    hazards = nodes_by_reason({node: hazard for node, hazard in sync_hazards.items() if hazard})
    suggestions = []
    for name in names:
        by_node = {node: by_name[name] for node, by_name in suggested.items() if name in by_name}
        value, reason = next(iter(by_node.values()))
        lacking = [node for node in installed if node not in by_node]
        notes = [f"{fold(lacking)}: not needed there, and harmless"] if lacking else []
        if name.startswith(("TORCH_", "CUDA_LAUNCH_")):
            notes += [f"{fold(nodes)}: {error}" for error, nodes in unknown]
        by_value = (NodesByValue(value, tuple(by_node)),)
        if hazards and name == "CUDA_LAUNCH_BLOCKING":
            reason = "; ".join(f"{fold(nodes)}: {hazard}" for hazard, nodes in hazards)
            suggestions.append(JobVariable(name, None, reason, False))
            continue
        suggestions.append(JobVariable(name, value, reason, True, by_value, (), tuple(notes)))
    return tuple(suggestions)


# --- The run.


def run(inventory: str, options: EnvOptions, tell: Tell) -> job_env.Environment | None:
    """The environment for a job on the nodes; None: interrupted. Raises Refused."""
    taken, settings = utc_now(), policy_settings(options.ports, None)
    nodes = targets.select_targets(inventory, options, settings, job=options.job, tell=tell.note)
    with nodes.transport as transport:
        outcomes = probe_nodes(nodes, tell, job_env.SUBJECTS)
        if transport.interrupted:
            return None
        snapshots = {outcome.node: outcome.value for outcome in outcomes if outcome.value}
        variables: list[job_env.JobVariable] = []
        if snapshots:
            fleet = FleetFacts(addresses=addresses_of_nodes(outcomes, transport.ssh_peers()))
            variables += job_env.variables(snapshots, nodes.policies, fleet)
        if (options.debug or options.sync_cuda) and snapshots:
            installed = _installed(nodes, [*snapshots], options.python, tell)
            variables += debug_variables(
                installed, options.directory, debug=options.debug, sync_cuda=options.sync_cuda
            )
        gaps = gaps_of(outcomes)
        keep_gaps(nodes, tell, gaps)
    return job_env.Environment(taken, tuple(snapshots), gaps, tuple(variables))


def _installed(
    nodes: Targets, names: list[str], python: str, tell: Tell
) -> dict[str, InstalledTorch]:
    """Node -> what is installed there for jobs, for the nodes that were probed."""
    nonce = new_nonce()
    requests = {name: Request(name, question(python, nonce), ASK_S + 5) for name in names}
    answers = ask_with_progress(nodes.transport, tell)("versions", requests)
    return {
        name: read_installed(answer.stdout, nonce)
        if answer.ok
        else InstalledTorch(reason=answer.reason() or "no answer")
        for name, answer in answers.items()
    }
