"""The witnesses beside the stacks (`nodeready.node.witnesses`), asked while the ranks go on.

Whatever a rank's user can have made is read in a fork (`processes.each`); tools run under the
`Supervisor`, each in a thread of ours with a limit of its own, so that the slowest of them takes
the time of the samples' interval and none of its own. A witness that fails or is late is absent,
with the reason, and costs nobody else.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from threading import Thread
from typing import Any

from nodeready.node.runtime import Supervisor
from nodeready.node.stacks import processes
from nodeready.node.stacks.processes import HANGS
from nodeready.node.stacks.ranks import Target
from nodeready.node.witnesses import devices, flight_recorder, logs, nccl_ras, settings
from nodeready.subjects import wire

#: Seconds for the witnesses of all processes, and for each tool of the node.
_EACH_S, _TOOL_S = 3.0, 8.0
#: Seconds before the end of everything by which a tool has ended.
_SPARE_S = 1.5
#: Characters of one witness's answer as JSON, of one text in it, and of an error's.
_MOST, _MOST_TEXT, _MOST_ERROR = 128 << 10, 4000, 200
#: Processes of a node that are asked for a dump of their flight recorder.
_MOST_DUMPS = 64

Answer = dict[str, Any]


def _absent(why: str) -> Answer:
    return {"absent": why[:_MOST_ERROR]}


def _asked(observe: Callable[[], Any]) -> Answer:
    """A witness's answer as plain data that the node's own can hold."""
    try:
        found = _bounded(wire.plain(observe()))
    except Exception as problem:  # noqa: BLE001
        return _absent(f"{type(problem).__name__}: {_bounded(str(problem))}")
    if not isinstance(found, dict):
        return _absent("it gave no answer")
    if len(json.dumps(found)) > _MOST:
        return _absent("its answer is too large")
    return found


def _bounded(value: Any) -> Any:
    """The same with texts that JSON can hold, none of them too long."""
    if isinstance(value, str):
        return value[:_MOST_TEXT].encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return [_bounded(one) for one in value]
    if isinstance(value, dict):
        return {_bounded(key): _bounded(one) for key, one in value.items()}
    return value


class Witnesses:
    """One round of all witnesses of a node.

    targets: the ranks, which have been looked at once; strangers and the dead are not asked about
    ras:     ask NCCL's port also where asking is known to have crashed jobs
    dump:    have each rank write a dump of its flight recorder
    check:   look at what each rank has for whoever debugs it
    """

    def __init__(
        self,
        supervisor: Supervisor,
        targets: Sequence[Target],
        *,
        ras: bool,
        dump: bool,
        check: bool = False,
    ) -> None:
        self._supervisor, self._targets, self._ras, self._dump = supervisor, targets, ras, dump
        self._check = check
        self._tools: dict[str, tuple[Thread, float]] = {}
        self._found: dict[str, Answer] = {}
        self._before, self._began = self._counters(), time.monotonic()

    def _counters(self) -> Any:
        """What the ports have counted; None: that hangs, or fails."""
        until = min(self._supervisor.deadline, time.monotonic() + _EACH_S)
        found = processes.each(lambda _: _asked(devices.counters), [0], until).get(0)
        return None if found is HANGS else found

    @property
    def _live(self) -> list[Target]:
        return [one for one in self._targets if one.facts and not one.rank.stranger]

    def between(self) -> None:
        """Ask all but the ports, while the ranks go on: after the first sample."""
        live = self._live
        if not live:
            return
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        since_s = max(0.0, now - min(one.rank.process.start_s for one in live))
        limit_s = max(0.5, min(_TOOL_S, self._supervisor.left_s - _SPARE_S))
        pids = [one.pid for one in live]
        self._start(
            "gpus", lambda: devices.gpus(self._supervisor, pids, since_s, limit_s), limit_s
        )
        self._start("kernel", lambda: devices.kernel(self._supervisor, since_s, limit_s), limit_s)
        self._ask_ras(limit_s)
        if self._dump:
            self._ask_for_dumps(live)
        self._of_each("logs", lambda one: logs.observe(one.pid, one.facts[-1].uid))
        if self._check:
            self._of_each(
                "settings",
                lambda one: settings.observe(
                    one.pid, one.facts[-1].uid, one.rank.identity.rank, _values(one)
                ),
            )
        if not self._dump:
            self._recordings()

    def _start(self, name: str, ask: Callable[[], Any], limit_s: float) -> None:
        self._found[name] = _absent(f"it gave no answer within {limit_s:.0f} s")

        def work() -> None:
            self._found[name] = _asked(ask)

        # One that never returns ends with us.
        thread = Thread(target=work, daemon=True)
        thread.start()
        self._tools[name] = thread, time.monotonic() + limit_s

    def _ask_ras(self, limit_s: float) -> None:
        """Ask NCCL's port on the node of the job's rank 0; of several jobs, the largest one's."""
        jobs: dict[tuple[str, str], list[Target]] = {}
        for one in self._live:
            who = one.rank.identity
            jobs.setdefault((who.owner, who.job), []).append(one)
        firsts = [job for job in jobs.values() if any(one.rank.identity.rank == 0 for one in job)]
        if not firsts:
            return
        job = max(firsts, key=len)
        asked = [(one.pid, one.facts[-1].uid, one.rank.identity.rank) for one in job]
        values = job[0].rank.process.environment or {}
        stacks = [one.dumps[-1].main or () for one in job if one.dumps]

        def ask() -> Any:
            making = any(
                nccl_ras.makes_communicator([(frame[0], frame[1]) for frame in stack])
                for stack in stacks
            )
            # What the ranks of other nodes do is not known here.
            known = True if making else None
            return nccl_ras.observe(
                self._supervisor, asked, values, self._ras, limit_s, initialising=known
            )

        self._start("nccl_ras", ask, limit_s)

    def _of_each(self, name: str, observe: Callable[[Target], Any]) -> None:
        """Ask a witness of each process, in a fork."""
        of = {one.pid: one for one in self._live}
        found = processes.each(
            lambda pid: _asked(lambda: observe(of[pid])),
            list(of),
            min(self._supervisor.deadline, time.monotonic() + _EACH_S),
            {pid: one.owner for pid, one in of.items()},
        )
        for pid, one in of.items():
            said = found.get(pid)
            if said is HANGS:
                said = _absent("it cannot be read: whoever tries waits")
            one.witnesses[name] = said or _absent("no time left")

    def _recordings(self) -> None:
        self._of_each(
            "flight_recorder",
            lambda one: flight_recorder.observe(
                one.pid, one.facts[-1].uid, one.rank.identity.rank, _values(one)
            ),
        )

    def _ask_for_dumps(self, live: Sequence[Target]) -> None:
        """Have the ranks write their recorders; they go on meanwhile."""
        of = {one.pid: one for one in live[:_MOST_DUMPS]}

        def ask(pid: int) -> str:
            one, uid = of[pid], of[pid].facts[-1].uid
            return str(
                flight_recorder.ask_for_dump(pid, uid, one.rank.identity.rank, _values(one))
            )

        until = min(self._supervisor.deadline, time.monotonic() + _EACH_S)
        said = processes.each(ask, list(of), until, {pid: one.owner for pid, one in of.items()})
        for pid, one in of.items():
            why = said.get(pid, "no time left")
            if why is HANGS:
                why = "whoever asks for it waits"
            one.add_note(
                f"no dump of its flight recorder: {str(why)[:_MOST_ERROR]}" if why else ""
            )

    def end(self) -> dict[str, Answer]:
        """After the last sample: the ports again, and what has been found of the node."""
        after = self._counters()
        seconds = time.monotonic() - self._began
        before = self._before
        if before is None or after is None or "absent" in before or "absent" in after:
            why = (before or after or {}).get("absent", "its counters cannot be read")
            self._found["network"] = _absent(str(why))
        else:
            self._found["network"] = _asked(lambda: devices.network(before, after, seconds))
        if self._dump and self._live:
            self._recordings()
        last = self._supervisor.deadline - _SPARE_S / 2
        for thread, until in self._tools.values():
            thread.join(max(0.0, min(until, last) - time.monotonic()))
        return dict(self._found)


def _values(one: Target) -> Mapping[str, str]:
    return one.rank.process.environment or {}
