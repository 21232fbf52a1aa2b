"""The verdict: the cause of a hang, from the waits between ranks and from all witnesses.

The rules stand in their order, and the first that finds evidence names the cause. A job that
progresses is not stuck. A rank that is gone is the cause. A strong witness about a lagging rank
outranks the stacks, unless that rank waits in turn for a rank without a witness. Then come the
ranks that wait for no rank while other ranks wait for them; then, where all wait, the network. A
single weak sign is reported, with the evidence that would help, but is never blamed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from nodeready.agent.witnesses.progress import LOG_COUNTS
from nodeready.core.text import counted
from nodeready.runs.stacks import advise, causes, hints, witness_reader
from nodeready.runs.stacks.classify import THREAD
from nodeready.runs.stacks.document import Group, Suspect, Verdict, say
from nodeready.runs.stacks.evidence import MAX_LINE, WitnessReport, ranks_of
from nodeready.runs.stacks.hung_job import GroupLinks, HangFinding, HangRule, HungJob, OddRanks
from nodeready.runs.stacks.witness_reader import GPU_COMPUTES

#: Beginning of the reason of missing ranks that run as another job.
OTHER_JOB_START = "started as part of"
#: Activities in which a rank sleeps, without polling, until its peers call.
_SLEEPING_ACTIVITIES = ("collective", "peer", "gpu", "backward")
#: Calls of one rank to another one; those that receive.
_PAIRWISE = re.compile(r"^(?:_?i?send|_?i?recv|batch_isend_irecv|(?:send|recv)_\w+)$")
_RECEIVES = re.compile(r"^_?i?recv(?:_|$)")
#: A wait for the lock of a file, or for a mutex, that a process has.
_HELD_LOCK = re.compile(r"(f?lock of .*|mutex of shared memory), held by pid ")
#: Results of the samples for active ranks.
_ACTIVE_VERDICTS = ("unsure", "spinning", "progressing")
#: Verdicts that name a cause.
_BLAMING_KINDS = ("late", "gone", "storage", "loader")
#: Sentences about jobs that may move, and about ranks that wait for no rank, or elsewhere.
_LOOK_LONGER = "look again, longer (--interval)"
#: Between two samples long work and an endless loop look alike.
_MOVES = "{who} works, in {at}, {waits}: slow, or in a loop: " + _LOOK_LONGER
_STANDS = "{who}: {action}; {waits}: {advice}"
#: A rank that has not called a collective. A thread of its peer has nothing to do, or may have.
_ASKS = (
    "{who} has not called {call}: it waits for {peer} in {at}, and {peer}'s thread {thread} for it"
)
_OWES = (
    "{who} {waits|wait} for {peer} in {at}, {peer} for {it|them} in {call}{thread}: "
    "look at what {it|they} asked"
)
_ELSEWHERE = "{who} {waits|wait} in {elsewhere}, {count} in {call}: they must agree"
#: Witnesses that would help.
_RECORDER, _LOGS = ("flight_recorder",), ("flight_recorder", "logs")
_NETWORK, _RAS = ("flight_recorder", "network"), ("flight_recorder", "nccl_ras")


class Decision(NamedTuple):
    """The verdict on a job."""

    verdict: Verdict | None  # None: no group
    groups: tuple[Group, ...]  # with their final roles
    order: tuple[int, ...]  # indexes of the groups, those of the suspects first
    by_witness: bool = False  # a witness names other suspects than the order of the stacks


def moves(job: HungJob) -> HangFinding | None:
    """Most ranks have moved between the samples."""
    moving = sum(group.processes for group in job.groups if group.verdict == "progressing")
    doubt = "; the others may wait for them: look again with a longer --interval"
    work = next((f": {text}" for text in job.work.values()), "")
    words = {"moving": f"{moving} of {job.total}", "work": work}
    words["doubt"] = doubt if moving < job.total else ""
    return HangFinding(words) if 2 * moving > job.total else None


def started_apart(job: HungJob) -> HangFinding | None:
    """Ranks that were started as part of another job."""
    ranks, nodes = job.odd.ranks, job.nodes_of(job.odd.ranks)
    reason = say(f"{{has|have}} {job.odd.reason}", len(ranks))
    strays = (group for group in job.groups if group.no_stack_reason.startswith(OTHER_JOB_START))
    if stray := next(strays, None):
        ranks, nodes, reason = stray.ranks, stray.nodes, stray.no_stack_reason
    words = {"who": ranks_of(ranks, nodes), "reason": reason}
    return HangFinding(words, [job.suspect(ranks, nodes, reason)], leads=True) if ranks else None


def ended_others(job: HungJob) -> HangFinding | None:
    """A rank has raised an error, and other ranks have ended: those are its victims."""
    rank = next((rank for rank in job.report.raised if rank in job.at), None)
    if not job.gone or job.ends or rank is None:
        return None
    action, error = causes.cause_of(job.groups[job.at[rank]]).action, job.report.raised[rank]
    for at in job.gone:
        job.set_role(at, "victim", f"has ended after rank {rank} raised")
    job.set_role(job.at[rank], "suspect", f"raised {error}")
    name, ended = ranks_of([rank], job.nodes_of([rank])), job.ranks_of(job.gone)
    words = {"who": name, "error": error, "ended": ranks_of(ended)}
    return HangFinding(words, [job.suspect([rank], None, action)], len(ended), leads=True)


def raised_alone(job: HungJob) -> HangFinding | None:
    """Ranks have raised an error and wait at the ends of their programs, unlike their peers."""
    ending = [at for at, group in enumerate(job.groups) if causes.ends_program(group)]
    ranks, raised = sorted(job.ranks_of(ending)), job.report.raised
    if not ranks or job.gone or len(ending) == len(job.groups) or {*ranks} - {*raised}:
        return None
    suspect = job.suspect(ranks, None, f"raised {raised[ranks[0]]}")
    words = {"who": ranks_of(ranks, suspect.nodes), "error": raised[ranks[0]]}
    words["call"] = causes.called(job.groups[ending[0]])
    return HangFinding(words, [suspect], len(ranks), leads=True)


def cannot_end(job: HungJob) -> HangFinding | None:
    """Ranks have ended, and all that are alive are at the ends of their programs."""
    ending = [at for at in range(len(job.groups)) if at not in job.gone]
    is_at_end = ending and all(causes.ends_program(job.groups[at]) for at in ending)
    if not (job.gone and is_at_end) or job.ends or job.victims or job.silent:
        return None
    for at in job.gone:
        job.set_role(at, None, "has ended, as all ranks are about to")
    for at in ending:
        job.set_role(at, "suspect", "is at the end of its program, and does not end")
    group, ended = job.groups[ending[0]], job.ranks_of(job.gone)
    cause = causes.child_cause(replace(group, activity="child"), "") or causes.cause_of(group)
    action = cause.action if group.frames else group.no_stack_reason
    if THREAD in group.frames:
        action = f"waits for its thread at {causes.position(group)}"
    words = {"who": job.name(ending), "action": action, "ended": ranks_of(ended)}
    return HangFinding(words, job.suspects_of(ending), len(ended), leads=True)


def unworkable(job: HungJob) -> HangFinding | None:
    """All that are alive wait, and a variable is known to keep ranks from reaching their peers."""
    # The rendezvous and Gloo connect when a group is created, NCCL in its first collective.
    # Where all have ended, a variable may have ended them. They have their last stacks.
    last = [hints.find(job.groups[at].frames) for at in job.gone if not job.victims]
    activities = [job.groups[at].activity for at in job.victims]
    activities += [hint.activity for hint in last if hint]
    prefixes = ("NCCL_", "CUDA_", "OMPI_", "UCX_", *(() if job.has_nccl else ("GLOO_SOCKET",)))
    rows = [
        (finding.ranks, finding.nodes, f"{finding.text}; {finding.advice}")
        for finding in job.report.environment
        if not {"start", "store"}.isdisjoint(activities) or not finding.variable
        or finding.variable.startswith(prefixes)
    ]  # fmt: skip
    if not rows or job.suspects or job.lags or job.ends:
        return None
    suspects = [job.suspect(ranks, nodes, f"environment: {text}") for ranks, nodes, text in rows]
    words = {"who": ranks_of(rows[0][0], rows[0][1]), "text": rows[0][2]}
    return HangFinding(words, suspects, leads=True)


def gone(job: HungJob) -> HangFinding | None:
    """Ranks have ended, were never there, or their node gives no answer."""
    named = [at for at in job.gone if job.groups[at].nodes or at in job.ends]
    named = named or ([] if job.suspects or job.lags else job.gone)
    if not named:
        return None
    first = next((at for at in named if at in job.ends), named[0])
    group, end, ranks = job.groups[first], job.ends.get(first), job.ranks_of(named)
    nodes = tuple(dict.fromkeys(node for at in named for node in job.groups[at].nodes))
    silent = [job.groups[at].no_stack_reason for at in named if at in job.silent]
    reason, sentence = causes.cut(group.no_stack_reason, MAX_LINE), ""
    if end:
        reason = end.text + (f" on {end.nodes[0]}" if len(end.nodes) == 1 and not nodes else "")
        sentence = "{who} {is|are} gone: {reason}{wait}"
    elif silent or group.no_stack_reason.endswith(advise.SILENT):
        reason = causes.cut((*silent, "no answer")[0], MAX_LINE)
        sentence = "{who}: no answer of the node ({reason}){wait}: see whether it is alive"
    elif len(job.gone) == len(job.groups):
        sentence = "{who} {has|have} ended: nodeready postmortem shows who failed first"
    elif group.kind == "dead":
        sentence = "{who} {has|have} ended ({reason}){wait}: see `nodeready cores` and dmesg"
    groups = [job.groups[at] for at in job.gone]
    suspects = [job.suspect(group.ranks, group.nodes, group.no_stack_reason) for group in groups]
    suspects += job.suspects_of(job.suspects)
    words, missing = {"who": ranks_of(ranks, nodes), "reason": reason}, () if end else None
    return HangFinding(words, suspects, max(1, len(ranks)), sentence=sentence, missing=missing)


def works(job: HungJob) -> HangFinding | None:
    """A rank works, or its descendants or its GPU, and no other rank keeps its peers waiting."""
    work, busy = dict(job.work), _busy_gpus(job)
    for at in {*job.suspects}.difference(work):
        ranks, is_awake = {*job.groups[at].ranks}, job.groups[at].verdict == "spinning"
        if ranks and ranks <= busy:
            work[at] = GPU_COMPUTES
        elif job.groups[at].activity == "compile" and is_awake:
            work[at] = "it compiles, and uses CPU time"
    working, late_ranks = list(work), {rank for lag in job.lags for rank in lag.ranks}
    # A rank that waits for its peers, and whose log counts, has got past a wait for all of them.
    is_past = any(text.startswith(LOG_COUNTS) and job.groups[at].activity in hints.FOR_RANKS
                  for at, text in work.items())  # fmt: skip
    is_alone = {*job.suspects} <= {*working} and late_ranks <= job.ranks_of(working)
    if not working or job.gone or not (is_alone or is_past):
        return None
    for at in {*working, *job.suspects}:
        job.set_role(at, None, "it works" if at in work else "the job moves")
    group = job.groups[working[0]]
    words = {"who": job.name(working), "work": work[working[0]], "at": causes.position(group)}
    return HangFinding(words, number=max(1, len(group.ranks)))


def late(job: HungJob) -> HangFinding | None:
    """A rank is late by a strong witness, which may clear a suspect, or its call differs."""
    for at in {*job.suspects}.intersection(job.cleared):
        call = job.report.called[job.groups[at].ranks[0]]
        job.set_role(at, None, f"the flight recorder says that it has called {call}")
        job.roles[at] = None
        job.suspects.remove(at)
    late_ranks = {rank for lag in job.lags for rank in lag.ranks}
    disputed = [at for at in job.suspects if late_ranks.intersection(job.groups[at].ranks)]
    if job.lags and job.suspects and not disputed:
        # A log may be of an earlier attempt: it does not prove that the peers have called.
        unrecorded = job.ranks_of(job.suspects).intersection(job.report.without_recording)
        if unrecorded or job.lags[0].witness == "logs":
            job.notes.append(f"{job.lags[0].witness}: {ranks_of(job.lags[0].ranks)} is late, too")
            return None
        job.notes.append("by its stack alone, another rank waits for no rank")
    if not job.lags:
        return None
    lag = max(job.lags, key=lambda lag: (lag.weight, len(lag.waiting)))
    standing = [*disputed, *sorted({job.at[rank] for rank in lag.ranks if rank in job.at})]
    standing = [at for at in standing if {*lag.ranks}.intersection(job.groups[at].ranks)]
    # An unreadable process does not show where the rank stands.
    group, role = (job.groups[standing[0]], job.roles[standing[0]]) if standing else (None, None)
    cause = causes.cause_of(group) if group and group.kind != "no-data" else None
    kind, sentence, place, sides = "late", "", "", [lag.ranks]
    if lag.silent:
        sentence = "{who}: no record of it, while {count} {wait} in {call}{place}"
    if lag.elsewhere and role != "suspect":
        kind, sentence = "disagree", _ELSEWHERE
        job.notes.append(f"it waits itself, in {lag.elsewhere}")
    elif lag.other:
        kind, sentence = "disagree", "{who} called {other}, {count} {call}: the calls must agree"
    elif cause and role != "victim":
        kind = cause.kind if cause.kind in ("loader", "storage") else "late"
        # A rank that has timed out has waited for long.
        place = f": {cause.action}{'' if lag.witness == 'logs' else job.slow(standing[0])}"
    elif cause and group and causes.position(group):
        place = f": it is at {causes.position(group)}"
        job.notes.append("its stack waits as the others' do")
    if lag.other:
        job.notes.append("the calls alone do not show which side is wrong")
        sides.append(lag.waiting)
    action = cause.action if cause and role == "suspect" else ""
    suspects = [job.suspect(side, None, action) for side in sides]
    further = [other.ranks for other in job.lags if other is not lag]
    suspects += [job.suspect(ranks) for ranks in further if {*ranks} - {*lag.ranks}]
    words = {
        "who": ranks_of(lag.ranks, job.nodes_of(lag.ranks)), "place": place, "other": lag.other,
        "call": f"{lag.call} ({lag.site})" if lag.site else lag.call, "elsewhere": lag.elsewhere,
        "count": counted(len(lag.waiting), "rank"), "wait": say("{waits|wait}", len(lag.waiting)),
    }  # fmt: skip
    return HangFinding(words, suspects, len(lag.ranks), kind, sentence, leads=True)


def stands(job: HungJob) -> HangFinding | None:
    """A rank waits for no rank, and other ranks wait for it, as far as is known."""
    if not job.suspects:
        return None
    if job.gone:
        job.notes.append(f"no node has {ranks_of(job.groups[job.gone[0]].ranks)}")
    leads = bool(job.gone or (job.victims and min(job.victims) < max(job.suspects)))
    if not job.victims:
        return replace(nobody_waits(job, job.suspects), leads=leads)
    cause = causes.cause_of(job.groups[job.suspects[0]])
    words = {"who": job.name(job.suspects), "action": cause.action, "advice": cause.advice}
    words["waits"] = f"{job.waits}{job.slow(job.suspects[0])}"
    first, suspects = job.groups[job.suspects[0]], job.suspects_of(job.suspects)
    child = causes.running_child(first)
    if first.verdict in ("progressing", "spinning") or first.work or child:
        at = f"its child process in {child}" if child else causes.called(first)
        words |= {"at": f"{at} ({first.work})" if first.work else at, "waits": job.waits}
        return HangFinding(words, suspects, sentence=_MOVES)
    if suspects[1:] and all(causes.opens_pipe(job.groups[at]) for at in job.suspects):
        # The kernel does not tell which process should open these pipes.
        words |= {"waits": job.waits, "advice": "nobody has opened the other ends of these pipes"}
        return HangFinding(words, suspects, leads=leads)
    return HangFinding(words, suspects, kind=cause.kind, leads=leads)


def _first_two(groups: Sequence[str]) -> str:
    """The first two groups in words, and how many there are besides."""
    further = f" (and {counted(len(groups) - 2, 'other group')})" if groups[2:] else ""
    return "; ".join(groups[:2]) + further


def nobody_waits(job: HungJob, indexes: Sequence[int]) -> HangFinding:
    """No rank waits for another one. indexes: the groups that do not wait"""
    groups = [job.groups[at] for at in indexes]
    first, cause, is_all = groups[0], causes.cause_of(groups[0]), job.size(indexes) == job.total
    words = {"who": job.name(indexes), "action": cause.action, "advice": cause.advice}
    if first.processes == job.total > 1:
        words["who"] = f"all {job.total} ranks"
    # Two samples of a running loop can be equal by chance.
    is_awake = all(group.verdict in _ACTIVE_VERDICTS for group in groups)
    is_free = is_all and not any(group.role or causes.left_lock(group) for group in groups)
    if is_free and (is_awake or all(group.activity == "sleep" for group in groups)):
        doubt = "all are awake: slow, or hung" if is_awake else "a pause, or a wait without an end"
        sentence = f"{{who}}: {{action}}; {doubt}: {_LOOK_LONGER}"
        return HangFinding(words, sentence=sentence, missing=_LOGS)
    unknown = {at for at in job.of_role(None) if job.groups[at].kind == "stack"}
    # Below a call of the user there may be the wait() of an asynchronous collective.
    may = job.size(unknown.difference(indexes)) if job.roles[indexes[0]] == "suspect" else 0
    waits = f"{counted(may, 'rank')} may wait for it (--native tells)"
    words["waits"] = waits if may else "no rank waits for another"
    words["action"] += job.slow(indexes[0]) if cause.kind in ("late", "loader") else ""
    is_one_kind = len({causes.cause_of(group).kind for group in groups}) == 1
    sentence, suspects = _STANDS, job.suspects_of(indexes)
    if is_one_kind and is_all and groups[1:] and not any(job.roles[at] for at in indexes):
        # Which rank comes first is chance.
        sides = [f"{job.name([at])} in {causes.position(job.groups[at])}" for at in indexes]
        words["sides"] = _first_two(sides)
        sentence = "{sides}: no stack is known to wait for another rank"
        suspects = [] if cause.kind == "late" else suspects
        if blocked := _blocked_among_pollers(job, indexes):
            cause = causes.cause_of(job.groups[blocked[0]])
            words |= {"who": job.name(blocked), "action": cause.action, "advice": cause.advice}
            sentence = "{who}: {action}; the others poll, maybe for what it should do: {advice}"
            suspects = job.suspects_of(blocked)
    is_certain = is_one_kind and (first.kind != "stack" or cause.kind in ("loader", "storage"))
    kind, missing = (cause.kind, ()) if is_certain and suspects else ("unclear", _LOGS)
    return HangFinding(words, suspects, 1, kind, sentence, missing)


def _blocked_among_pollers(job: HungJob, indexes: Sequence[int]) -> list[int]:
    """The only group that is blocked, where all further ones sleep and look again; [] if none."""
    blocked = [at for at in indexes if job.groups[at].verdict == "blocked"]
    further = [job.groups[at] for at in indexes if at not in blocked]
    polls = all(group.verdict == "unsure" and group.activity == "sleep" for group in further)
    return blocked if len(blocked) == 1 and polls else []


def may_wait_too(job: HungJob) -> HangFinding | None:
    """Ranks that may wait for those that wait: neither side is known to be late."""
    may = [at for at in job.of_role(None) if advise.may_wait(job.groups[at])]
    if not (may and job.victims):
        return None
    first, waiting = job.groups[may[0]], job.name(job.victims, nodes=False)
    words = {"who": job.name(may), "place": causes.position(first)}
    words["waiting"] = f"{waiting} {say('{waits|wait}', len(job.first.ranks))}"
    words["other_call"] = causes.called(job.first)
    return HangFinding(words, number=len(first.ranks))


def idle(job: HungJob) -> HangFinding | None:
    """Ranks have nothing to do, and their peers wait for them."""
    unknown = job.unknown()
    if not unknown or any(job.groups[at].activity != "idle" for at in unknown):
        return None
    first = job.groups[unknown[0]]
    held = f" ({causes.awaited_object(first)})" if causes.awaited_object(first) else ""
    words = {"who": job.name(unknown), "action": first.hint.partition(":")[0] + held}
    return HangFinding(words, number=max(1, len(first.ranks)))


def unclear_part(job: HungJob) -> HangFinding | None:
    """Of ranks it is not known whether they wait."""
    unknown = job.unknown()
    if not unknown:
        return None
    first, is_moving = job.groups[unknown[0]], job.groups[unknown[0]].verdict == "progressing"
    if not job.victims and first.frames:
        return nobody_waits(job, unknown)
    still = any(advise.stands_still(job.groups[at]) for at in job.victims)
    position = causes.position(first)
    place = causes.cut(first.no_stack_reason, MAX_LINE) or first.reason or f"stands in {position}"
    words = {"who": job.name(unknown[:1]), "place": place, "at": position}
    sentence = ""
    if job.victims and (is_moving or (first.verdict in _ACTIVE_VERDICTS and not still)):
        sentence = _MOVES
    is_named = job.victims and 2 * job.size(unknown) <= job.total and (still or is_moving)
    return HangFinding(words, job.suspects_of(unknown if is_named else ()), sentence=sentence)


def other_order(job: HungJob) -> HangFinding | None:
    """Ranks wait for each other in two groups."""
    lags = [lag for lag in job.report.lags if lag.chained and lag.weight > 1][:2]
    rows = [f"{ranks_of(lag.waiting)} in {lag.call} for {ranks_of(lag.ranks)}" for lag in lags]
    suspects = [job.suspect(lag.ranks) for lag in lags]
    return HangFinding({"rows": ", and ".join(rows)}, suspects) if lags[1:] else None


def holds_lock(job: HungJob) -> HangFinding | None:
    """Ranks wait for ranks that wait for the locks of files which they have."""
    locks: dict[int, str] = {}
    waiting: set[int] = set()
    for at in job.victims:
        group, holders = job.groups[at], job.links[at].waits_for
        lock = _HELD_LOCK.match(group.waits_on[0]) if len(group.waits_on) == 1 else None
        if lock and len(holders) == 1 and job.at.get(holders[0], at) in {*job.victims} - {at}:
            locks[holders[0]] = f"the {lock[1]}"
            waiting.update(group.ranks)
    # Who waits for a lock is the cause only where all do.
    first = {rank: text for rank, text in locks.items() if rank not in waiting}
    # In a circle no rank comes first, but for one that keeps several from the lock that it has. A
    # thread's wait for a further lock is not seen here.
    is_pair = len(first) < len(locks) or len(waiting) == 1
    is_circle = any(_circle(job, rank) > (1 if is_pair else 2) for rank in first)
    locks = first or locks
    if not locks or is_circle:
        return None
    suspect = job.suspect(locks, None, f"has {next(iter(locks.values()))}")
    words = {"who": ranks_of(locks, suspect.nodes), "locks": " and ".join(locks.values())}
    words |= {"others": ranks_of(waiting), "call": causes.called(job.groups[job.at[min(locks)]])}
    return HangFinding(words, [suspect], len(locks), leads=True)


def _circle(job: HungJob, rank: int) -> int:
    """The ranks of the circle in which a rank waits for itself; 0: it is in none."""
    passed, awaited = {rank}, job.links[job.at[rank]].waits_for
    while len(awaited) == 1 and awaited[0] in {*job.at} - passed:
        passed.add(awaited[0])
        awaited = job.links[job.at[awaited[0]]].waits_for
    return len(passed) if awaited == (rank,) else 0


def each_other(job: HungJob) -> HangFinding | None:
    """Ranks wait for single ranks, whose calls need not agree, and which wait for ranks, too."""
    groups = sorted((job.groups[at] for at in job.victims), key=lambda group: group.processes)
    rows = [f"{ranks_of(group.ranks)} in {causes.called(group)}" for group in groups]
    words = {"rows": _first_two(rows)}
    asking = [group for group in groups if group.activity == "rank"]
    calling = [group for group in groups if group.activity != "rank"]
    if not asking:
        return None
    ranks = sorted(rank for group in asking for rank in group.ranks)
    awaited = {other for rank in ranks for other in job.links[job.at[rank]].waits_for}
    is_one_call = len({causes.place_of_call(group) for group in calling}) == 1
    is_one_call &= all(group.activity == "collective" for group in calling)
    is_one = len(awaited) == 1 and awaited <= {rank for group in calling for rank in group.ranks}
    is_numbered = len(ranks) == sum(group.processes for group in asking)
    if not (is_one and is_one_call and is_numbered):
        # Only those in a circle have not called the collective of all further ranks.
        is_circle = is_one_call and is_numbered and set() < awaited <= {*ranks}
        return HangFinding(words, [job.suspect(ranks)] if is_circle else ())
    # They alone have not called the collective, as they wait for a rank that has.
    (peer,) = awaited
    words |= {"who": ranks_of(ranks, job.nodes_of(ranks)), "peer": ranks_of([peer])}
    words |= {"at": causes.called(asking[0]), "call": causes.called(calling[0])}
    suspects, clients = [job.suspect(ranks), job.suspect([peer])], job.links[job.at[peer]].clients
    if len(ranks) == 1 and ranks[0] in clients:
        words["thread"] = causes.cut(clients[ranks[0]])
        return HangFinding(words, suspects[:1], 1, "late", _ASKS, (), leads=True)
    # Where several ask the peer, or its threads wait for other ranks, the peer comes first.
    is_peer = clients or len(ranks) > 1
    threads = (f" (its thread {causes.cut(name)} for {ranks_of([rank])})"
               for rank, name in clients.items() if rank != peer)  # fmt: skip
    words["thread"] = next(threads, "")
    return HangFinding(words, suspects[:: -1 if is_peer else 1], len(ranks), sentence=_OWES)


def calls_differ(job: HungJob) -> HangFinding | None:
    """The ranks wait in different calls. How many wait in each is no evidence."""
    places: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for at in job.victims:
        places[causes.place_of_call(job.groups[at])].append(at)
    if len(places) < 2 or job.report.common:
        return None
    order, names = sorted(places.values(), key=job.size), {name for name, _ in places}
    few, many = job.groups[order[0][0]], job.groups[order[-1][0]]
    call, other, is_odd = causes.called(few), f"in {causes.called(many)}", False
    suspects: list[Suspect] = []
    if any(not names.isdisjoint(job.links[at].calls) for at in job.victims):
        end = ", threads in the same: another order of two communicators?"
    elif few.processes == 1 < many.processes == job.total - 1 and _RECEIVES.match(
        causes.place_of_call(many)[0]
    ):
        # A rank that receives waits for another one that does, or for the only one that does not.
        end, suspects = ": no rank sends to them", [job.suspect(few.ranks, few.nodes)]
    elif any(map(_PAIRWISE.match, names)) or len(places) > 2:
        end = ": all wait; the flight recorder would show for which rank"
    else:
        order_too = ", or their order in several groups," if len(names) == 1 else ""
        end, is_odd = f": the calls{order_too} must agree", True
        pairs = (pair for pair in zip(few.frames, many.frames, strict=False) if pair[0] != pair[1])
        if other == f"in {call}" and (callers := next(pairs, None)):
            # One function makes the call for two callers.
            call += f" for {causes.place_text(callers[0])}"
            other = f"for {causes.place_text(callers[1])}"
    few_ends, many_end = causes.ends_program(few), causes.ends_program(many)
    call += ", at the end of the program" if few_ends and not many_end else ""
    other += ", at the end of the program" if many_end and not few_ends else ""
    words = {"who": ranks_of(few.ranks, few.nodes), "call": call, "end": end}
    words["others"] = f"{ranks_of(many.ranks)} {other}"
    kind, missing = ("disagree", _RECORDER) if is_odd else ("unclear", _RAS)
    return HangFinding(words, suspects, len(few.ranks), kind, missing=missing)


def sign_of_a_node(job: HungJob) -> HangFinding | None:
    """All wait in the same call, and a witness tells of some nodes or ranks."""
    for strength, sign, ranks, nodes in job.signs()[:1]:
        words = {"who": ranks_of(ranks, [*nodes]), "sign": sign}
        suspect = job.suspect(ranks, nodes)
        if strength > 1:
            kind = "slow-node" if job.rate >= witness_reader.MOVING_BYTES_PER_S else "quiet"
            kind = "storage" if "file system" in sign else kind
            return HangFinding(words, [suspect], kind=kind, missing=(), leads=True)
        suspect = replace(suspect, against=(*suspect.against, "this is one weak sign"))
        return HangFinding(words, [suspect], sentence="{summary}; the only sign: {who}: {sign}")
    return None


def gpus_compute(job: HungJob) -> HangFinding | None:
    """All wait, and most GPUs compute."""
    busy = _busy_gpus(job)
    return HangFinding({"busy": str(len(busy))}) if 2 * len(busy) > job.total else None


def _busy_gpus(job: HungJob) -> set[int]:
    rows = (row for name, row in job.statements if name == "gpu")
    return {rank for row in rows if row.text.startswith(GPU_COMPUTES) for rank in row.ranks}


def wake_up(job: HungJob) -> HangFinding | None:
    """Most ranks wake up where a rank sleeps until its peers call."""
    awake = [at for at in job.victims if job.groups[at].verdict == "unsure"
             and job.groups[at].activity in _SLEEPING_ACTIVITIES]  # fmt: skip
    is_measured = job.report.common or job.report.bytes_per_s is not None
    return HangFinding() if 2 * job.size(awake) > job.total and not is_measured else None


def quiet(job: HungJob) -> HangFinding:
    """All wait in the same call, and nothing tells why."""
    advice = "look at the network and its ports"
    if job.first.activity in ("start", "store"):
        advice = "look at MASTER_ADDR:MASTER_PORT, the launchers and the network"
    bytes_text = " and no bytes move" if job.report.bytes_per_s is not None else ""
    return HangFinding({"bytes": bytes_text, "advice": advice})


#: The rules in their order.
RULES = (
    HangRule("not-stuck", moves,
             "not stuck: {moving} ranks go on between the samples{work}{doubt}"),
    HangRule("disagree", started_apart,
             "{who} {reason}{wait}: what they were started with must agree"),
    HangRule("gone", ended_others, "{who} raised {error}; {ended} {has|have} ended since"),
    HangRule("late", raised_alone, "{who} raised {error}, and {is|are} at the end of {its|their} "
             "program, in {call}; the others are not"),
    HangRule("late", cannot_end, "{who}: is at the end of its program, and {action}; "
             "{ended} {has|have} ended: look there"),
    HangRule("environment", unworkable, "{who}: {text}"),
    HangRule("gone", gone, "{who}: no node has {it|them}{wait}: "
             "see dmesg, `nodeready cores`, the launcher's output", ("kernel", "logs")),
    HangRule("moving", works, "{who} {works|work} at {at}: {work}{wait}"),
    HangRule("late", late, "{who} {has|have} not called {call}, which {count} {wait} in{place}"),
    HangRule("unclear", stands, _STANDS, _RECORDER),
    HangRule("unclear", may_wait_too, "{who} {stands|stand} in {place}, and may wait there, as "
             "for an asynchronous collective; {waiting} in {other_call}: --native tells", _LOGS),
    HangRule("unclear", idle,
             "{who} {is|are} idle: {it|they} {action}{wait}: a hang only if there should be work"),
    HangRule("unclear", unclear_part, "{who}: {place}: its part is unclear", _LOGS),
    HangRule("disagree", other_order, "{rows}: the order differs"),
    HangRule("late", holds_lock, "{who} {has|have} {locks}, {keeps|keep} {others} waiting, and "
             "{waits|wait} in {call}"),
    HangRule("unclear", each_other,
             "{rows}: all wait for each other: look at what they asked", _RAS),
    HangRule("disagree", calls_differ, "{who} {waits|wait} in {call}, {others}{end}"),
    HangRule("unclear", sign_of_a_node, "{who}: {sign}; {summary}", _NETWORK),
    HangRule("moving",
             lambda job: job.rate >= witness_reader.MOVING_BYTES_PER_S
             and HangFinding({"rate": f"{job.rate / 1e6:.0f}"}),
             "{summary}, and {rate} MB/s move: slow, or a very large one: look again"),
    HangRule("moving", gpus_compute, "{summary}, and the GPUs of {busy} compute: "
             f"a long step, or a loop: {_LOOK_LONGER}"),
    HangRule("unclear", lambda job: any(job.groups[at].verdict is None for at in job.victims) and
             HangFinding(), "{summary}: one look cannot tell whether it moves: try --samples 2",
             _NETWORK),
    HangRule("unclear", wake_up, "{summary}, and wake up there: "
             f"slow, or hung: {_LOOK_LONGER}", _NETWORK),
    HangRule("unclear", lambda job: job.total == 1 and not job.report.common and HangFinding(),
             "the only rank that was found waits in {call}: find the others", _RAS),
    HangRule("disagree", lambda job: not job.report.common and all(
             _RECEIVES.match(causes.place_of_call(job.groups[at])[0]) for at in job.victims) and
             HangFinding(), "{summary}: no rank sends: the order of sends and receives must agree",
             _RECORDER),
    # Python's frames do not show how many process groups the job has.
    HangRule("quiet", quiet, "{summary}{bytes}: {advice}, and at the order of calls in several "
             "groups", (*_NETWORK, "nccl_ras")),
)  # fmt: skip


def decide(
    groups: Sequence[Group], report: WitnessReport, places: Iterable[tuple[Any, ...]],
    odd: OddRanks, links: Sequence[GroupLinks],
) -> Decision:  # fmt: skip
    """The verdict on groups in their order of suspicion. places: (node, pid, rank, ...).
    links: by group
    """
    if not groups:
        return Decision(None, (), ())
    job = HungJob(groups, report, places, odd, links)
    findings = ((rule, rule.evidence(job)) for rule in RULES)
    rule, finding = next((rule, finding) for rule, finding in findings if finding)
    verdict, leads = rule.verdict(job, finding), finding.leads
    order = job.order(verdict.suspects if leads else ())
    is_odd = verdict.kind == "disagree" and leads and len(verdict.suspects) == 1
    for suspect in verdict.suspects[:1] if is_odd or verdict.kind in _BLAMING_KINDS else ():
        for at, group in enumerate(job.groups):
            # A group is a suspect if a witness names all its ranks.
            if group.role == "victim" and group.ranks and {*group.ranks} <= {*suspect.ranks}:
                job.set_role(at, "suspect", next(iter(suspect.for_), group.reason))
    final = tuple(job.groups)
    return Decision(verdict, final, order, leads or final != tuple(groups))
