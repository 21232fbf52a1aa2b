"""The run of `nodeready stacks`: asks a job's ranks, or reads the archive of an earlier run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gevent

from nodeready.agent import debugger
from nodeready.agent.asking import NodeChannel, Transport, request
from nodeready.agent.debugger import DebuggerConfig, DebuggerOutput
from nodeready.agent.stacks.program import StacksConfig
from nodeready.agent.stacks.ranks import CLAIMS
from nodeready.core.exit_codes import FAILED, Refused
from nodeready.core.outcome import gaps_code, node_gaps
from nodeready.core.policy import Policy
from nodeready.core.text import utc_now
from nodeready.fleet.transport.channels import Channels
from nodeready.runs import targets
from nodeready.runs.jobs import IF_ENDED, running_lines
from nodeready.runs.options import StacksOptions
from nodeready.runs.stacks import debuggable, group, trace
from nodeready.runs.stacks.collect import (
    LONGER_S,
    Captured,
    capture,
    count_system_calls,
    no_ranks_reason,
    program_config,
    unwind,
    with_launchers,
)
from nodeready.runs.stacks.debuggable import Debuggable
from nodeready.runs.stacks.document import Stacks
from nodeready.runs.stacks.trace import Trace, TraceError
from nodeready.runs.targets import Targets, ask_with_progress, keep_gaps
from nodeready.runs.tell import Tell

#: Of --slow: seconds for one stack of each rank, and minimum and maximum stacks.
_LOOK_S, _MIN_LOOKS, _MAX_LOOKS = 4.0, 10, 30
#: Kind of document, and the document -> file extension -> the pieces of that format.
Render = Callable[[str, Any], Mapping[str, Iterable[str]]]
#: What the user types, b"" at its end; and what shows the rank's text to the user.
Terminal = tuple[Callable[[], bytes], Callable[[str], None]]
#: Maximum processes and gaps in a message; seconds of a session, and of output after its input.
_MAX_NAMED, _SESSION_S, _LAST_S = 3, 12 * 3600, 5.0


def run(inventory: str | None, options: StacksOptions, tell: Tell, render: Render) -> Stacks:
    """The stacks of the job's ranks, kept in the directory of ``--output``. Raises Refused.
    inventory: None: this machine, the job's nodes, or the directory of ``--from``
    """
    config = _program_config(inventory, options)
    asks = options.native or options.syscalls or options.locals_ or options.dump or options.ras
    if options.source is not None and asks:
        words = "--native, --syscalls, --locals, --dump and --ras"
        raise Refused(f"--from: asks no node; remove {words}")
    directory = None if options.output is None else trace.prepare(options.output)
    if options.source is not None:
        stacks = _read_archive(options, directory)
    else:
        nodes, config = _targets(inventory, options, config, tell)
        with nodes.transport:
            stacks = _capture_stacks(nodes, options, config, tell, directory)
    if directory is not None:
        texts = {f"stacks{end}": text for end, text in render("stacks", stacks).items()}
        trace.write(directory, stacks, texts)
        tell.note(f"{directory}: the traces, and {', '.join(texts)}")
    return stacks


def check(inventory: str | None, options: StacksOptions, tell: Tell) -> Debuggable:
    """How debuggable the running job is. Raises Refused."""
    config = _program_config(inventory, options)
    if options.source is not None:
        raise Refused("--check: needs a running job; remove --from")
    if options.output is not None:
        raise Refused("--check: keeps no stacks; remove -o")
    nodes, config = _targets(inventory, options, config, tell)
    with nodes.transport:
        started = utc_now()
        captured = _capture(nodes, replace(config, check=True, samples=1), tell)
        document = debuggable.judge(
            captured.traces(), captured.gaps, started=started, finished=utc_now(),
            complete=captured.complete,
        )  # fmt: skip
        keep_gaps(nodes, tell, document.gaps, complete=captured.complete)
        if not document.findings and not document.gaps:
            _explain_missing_ranks(nodes, captured, tell)
    return document


def attach(
    inventory: str | None, options: StacksOptions, rank: int, tell: Tell, terminal: Terminal
) -> None:
    """A debugger's session with one rank. Raises Refused, also if the rank cannot be debugged."""
    config = _program_config(inventory, options)
    if options.source is not None or options.output is not None or options.check:
        raise Refused("--attach: cannot be combined with --from, --check and -o")
    nodes, config = _targets(inventory, options, config, tell)
    with nodes.transport:
        captured = _capture(nodes, replace(config, samples=0), tell)
        node, pid = find_rank(captured, rank)
        tell.note(f"rank {rank} is process {pid} on {node}")
        hold_session(nodes.transport, node, pid, rank, terminal)


def _program_config(inventory: str | None, options: StacksOptions) -> StacksConfig:
    """The configuration of the program on the nodes. Raises Refused."""
    source = options.source
    named = inventory is not None, options.local, source is not None
    if options.via == "ssh" and sum(named) != 1:
        raise Refused("give one of: an INVENTORY, --local, --from DIR, or --via srun --job ID")
    if options.via != "ssh" and (options.local or source):
        raise Refused(f"--via {options.via}: cannot be combined with --local or --from")
    if options.limit is not None and inventory is None:
        raise Refused("--limit: selects from an INVENTORY, and there is none")
    # Ranks that these options leave out are not missing.
    excluding = {"--pid": bool(options.pids), "--limit": options.limit is not None}
    is_longer = options.samples is None and options.interval is None
    samples, interval_s = options.samples or 2, options.interval or 2.0
    if options.slow is not None:
        if source is not None or options.check or options.native or not is_longer:
            raise Refused(
                "--slow: cannot be combined with --from, --check, --native, --samples, --interval"
            )
        samples = max(_MIN_LOOKS, min(_MAX_LOOKS, round(options.slow / _LOOK_S)))
        interval_s, is_longer = options.slow / samples, False
    return program_config(
        options.timeout + round(options.slow or 0),
        job=options.job or "",
        pids=options.pids,
        match=options.match or "",
        user=options.user or "",
        locals=options.locals_,
        dump=options.dump,
        ras=options.ras,
        part=" and ".join(name for name, is_given in excluding.items() if is_given),
        samples=samples,
        interval_s=interval_s,
        longer_s=LONGER_S if is_longer else 0.0,
        slow_s=options.slow or 0.0,
    )


def _targets(
    inventory: str | None, options: StacksOptions, config: StacksConfig, tell: Tell
) -> tuple[Targets, StacksConfig]:
    """The nodes, and the configuration with the Slurm job's number and the transport's tag."""
    if options.local:
        nodes = targets.local_targets(Policy())
    else:
        uses_srun = options.via == "srun" or inventory is None
        job = config.job if uses_srun and config.job else None
        nodes = targets.select_targets(inventory, options, job=job, tell=tell.note)
    return nodes, replace(config, job=nodes.job or config.job, tag=nodes.transport.tag)


def _capture_stacks(
    nodes: Targets,
    options: StacksOptions,
    config: StacksConfig,
    tell: Tell,
    directory: Path | None,
) -> Stacks:
    started = utc_now()
    captured = _capture(nodes, config, tell)

    def group_traces(directory: Path | None) -> Stacks:
        return group.group(
            _archive_traces(captured.traces(), directory),
            captured.gaps,
            all_threads=options.all_threads,
            started=started,
            finished=utc_now(),
            complete=captured.complete,
        )

    ask = ask_with_progress(nodes.transport, tell)
    if options.native and captured.complete:
        for problem in unwind(captured, ask, group_traces(None)):
            tell.say(problem)
    if options.syscalls and captured.complete:
        stacks = group_traces(None)
        for problem in count_system_calls(captured, ask, stacks, options.syscalls):
            tell.say(problem)
    stacks = with_launchers(group_traces(directory), captured)
    keep_gaps(nodes, tell, stacks.gaps, complete=captured.complete)
    if not stacks.processes and len(captured.gaps) < len(captured.nodes):
        _explain_missing_ranks(nodes, captured, tell)
    return stacks


def _capture(nodes: Targets, config: StacksConfig, tell: Tell) -> Captured:
    from nodeready.fleet.inventory.slurm import job_placement

    names = nodes.transport.nodes
    # Slurm's record of the job tells whose ranks they are. --user and --pid already say it.
    placement = None if config.user or config.pids else job_placement(config.job, names)
    return capture(ask_with_progress(nodes.transport, tell), names, config, placement)


def _archive_traces(traces: Iterator[Trace], directory: Path | None) -> Iterator[Trace]:
    return traces if directory is None else trace.keep_traces(directory, traces)


def _explain_missing_ranks(nodes: Targets, captured: Captured, tell: Tell) -> None:
    """Tell why no rank was found, and which jobs run. Raises Refused if all nodes say so."""
    is_named = bool(captured.config.job) and captured.complete
    running = running_lines(nodes, tell) if is_named else []
    if running:
        captured.instead.clear()
    lines = [no_ranks_reason(captured), *running, *([IF_ENDED] if is_named else [])]
    if not captured.gaps:
        raise Refused("\n".join(lines))
    for line in lines:
        tell.say(line)


def _read_archive(options: StacksOptions, directory: Path | None) -> Stacks:
    source = str(options.source)
    try:
        traces, gaps = trace.read_directory(Path(source))
        stacks = group.group(
            _archive_traces(traces, directory), gaps, all_threads=options.all_threads
        )
    except TraceError as problem:
        raise Refused(f"--from {problem}") from None
    if not stacks.processes and not stacks.gaps:
        raise Refused(f"--from {source}: no ranks in it")
    return stacks


# --- The session of --attach with one rank.


def find_rank(captured: Captured, rank: int) -> tuple[str, int]:
    """The node and the process of a rank. Raises Refused."""
    rows = [(trace.node, process) for trace in captured.traces() for process in trace.processes]
    rows = [row for row in rows if row[1].rank == rank and not row[1].note.startswith(CLAIMS)]
    rows = rows if captured.complete else []
    if len(rows) == 1:
        return rows[0][0], rows[0][1].pid
    if rows:
        names = ", ".join(f"process {row.pid} on {node}" for node, row in rows[:_MAX_NAMED])
        raise Refused(f"--attach {rank}: several jobs have it ({names}): add --job or --pid")
    gaps = node_gaps(captured.gaps)
    reasons = [f"{gap.node}: {gap.reason}" for gap in gaps[:_MAX_NAMED]]
    code = gaps_code(gaps, complete=captured.complete, usage=not gaps)
    raise Refused("\n".join([f"--attach {rank}: no process has this rank", *reasons]), code)


def hold_session(transport: Transport, node: str, pid: int, rank: int, terminal: Terminal) -> None:
    """Connect the user with the rank's debugger. Raises Refused, also for a lost connection."""
    channels = Channels(transport, time.monotonic() + _SESSION_S)
    config = DebuggerConfig(channels.nonce, transport.tag, rank, pid, _SESSION_S)
    channels.start(request(node, debugger.__name__, config, mark=config.nonce, stdin=True))
    typing = gevent.spawn(_send_input, channels.open[node], terminal[0], gevent.getcurrent())
    try:
        while output := channels.read(node, "debugger", DebuggerOutput, _SESSION_S):
            if output.is_last:
                break
            terminal[1](output.text)
    except gevent.GreenletExit:
        return
    finally:
        typing.kill()
        channels.close()
    if reason := output.text if output else channels.lost[node].reason:
        raise Refused(f"--attach {rank}: {reason}", FAILED)


def _send_input(channel: NodeChannel, read: Callable[[], bytes], session: Any) -> None:
    unsent = b""
    while data := read():
        *lines, unsent = (unsent + data).split(b"\n")
        for line in lines:
            channel.send_line(line.decode("utf-8", "surrogateescape"))
    channel.send_line("q")
    gevent.sleep(_LAST_S)
    gevent.kill(session)
