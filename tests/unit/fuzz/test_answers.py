"""Mutated answers of a node: each is an observation, or one line that says what is wrong."""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeready.agent import tail
from nodeready.agent.asking import Answer, rows
from nodeready.agent.cores import gcore
from nodeready.agent.cores import program as cores
from nodeready.agent.cores.program import CoreFile, Listing
from nodeready.agent.proofs import mesh
from nodeready.agent.stacks import program as stacks
from nodeready.core import wire
from nodeready.core.base import ProbeError, Unknown
from nodeready.core.policy import Policy
from nodeready.core.result import FleetFacts
from nodeready.reports.registry import find_format
from nodeready.runs.stacks import group, trace
from nodeready.runs.tail import Grouping, parse_tail
from nodeready.subjects import snapshot
from nodeready.subjects.proof import facts as proof
from nodeready.subjects.proof.facts import (
    CoreDirectory,
    Limit,
    LimitsLine,
    Logins,
    PamLine,
    PdshAnswer,
    PdshRun,
    Peers,
    ProvedCore,
    RcmdDefault,
    Service,
    SshTry,
    User,
)
from nodeready.subjects.registry import SUBJECTS
from tests.builders import proof as proved
from tests.builders.hostile import RECORDED, envelope, look, mutated, recorded, spoiled
from tests.builders.traces import LOAD, REDUCE, process
from tests.builders.traces import document as made
from tests.builders.witnesses import gpu, gpus, kernel, log, network, port, ras, status, waits
from tests.unit.fuzz.alone import DO

POLICY = Policy()
ALONE = FleetFacts()
PROBES = snapshot.probes()


def one_line(reason: str) -> None:
    """The reason why an answer makes no sense is short, and safe to show."""
    assert reason.isprintable(), reason
    assert len(reason) < 300, reason


def judged(text: str) -> None:
    seen = snapshot.read(text, PROBES, POLICY, RECORDED)
    assert set(seen.subjects) == {probe.subject for probe in PROBES}
    for result in snapshot.judge(seen, POLICY):
        assert result.status in ("ok", "warn", "fail", "unknown", "na")
    json.dumps(wire.plain(seen.subjects))
    for name, subject in SUBJECTS.items():
        observed = seen.subjects.get(name)
        if observed is not None and not isinstance(observed, Unknown):
            facts = [subject.compared(observed, ALONE), subject.learned(observed)]
            json.dumps([*facts, subject.counters and subject.counters(observed, ALONE)])


FILE = CoreFile("/c/core.1", 1, 7, 5, 0, 0.5, ".zst", "gpu1", 4711, 11)
KINDS = {
    "listing": Listing(("/c/*",), (FILE,), 1, ("a note",)),
    "core": cores.CoreSummary(
        0, "", "w", 5, 1, 11, 0, "ada", "sh", "/bin/sh", "sh", 3, 1, "7", "eJw="
    ),
    "done": cores.ReadTotals(1, 2, 3),
    "seen": gcore.Preview(*(0 for _ in gcore.Preview.__dataclass_fields__)),
    "listening": mesh.Listening("t", (29500,), (mesh.Busy(1, "x"),), ("10.1.0.5",)),
    "round": mesh.MeshRound(1, "n", ("::1",), "", "::1", (mesh.Try(1, "ok", 0.5, ""),), 1),
    "user": User("ml", 2000, True, ""),
    "limits": proved.LIMITS,
    "attach": proved.WELL.attach,
    "core_proof": ProvedCore("core", directory=CoreDirectory("/c")),
    "peers": Peers(
        "n", True, (SshTry("m", 0, "m", ""),), True,
        PdshRun(("m",), (PdshAnswer("m", "x"),), 0, ""),
        (RcmdDefault("login", "rsh", "rsh", "/etc/profile:3", False, ""),),
    ),
    "ssh": proof.SessionProof("", False, proved.LIMITS, proved.WELL.attach, ProvedCore("core")),
    "step": proof.SessionProof("Requested nodes are busy"),
    "logins": Logins(
        (Service("ssh", "/p", True, (PamLine("limits", "conf=/x", "/p:1"),)),),
        True, "/run/nologin", "down", False, (Limit(0, -1),), (),
        (LimitsLine("/l", 1, "ml - core 0"),), ("ml",),
    ),
}  # fmt: skip


class RowConfig:
    nonce = "N"


def read_row(text: str, name: str) -> None:
    try:
        rows(Answer(text), RowConfig, {name: type(KINDS[name])})
    except ProbeError as problem:
        one_line(problem.reason)
    config = proved.configured()
    seen = proof.read(text.replace("N ", f"{config.nonce} "), config)
    assert isinstance(seen.user, (User, Unknown))


LOG = tail.LogTail("/log/rank_1.log", 9, 1.6e9, 5.0, ("step 1 12:00:00", "a" * 99), 3)
TAIL = tail.NodeTail(
    "gpu1", (LOG, LOG), (tail.UnreadFile("/log/x", "is a FIFO", False),), 1, 2, ""
)


def read_logs(answer: object) -> None:
    text = wire.pack(json.dumps(answer).encode())
    try:
        tails = parse_tail(f'N tail "{text}"\n', "N")
    except ProbeError:
        return
    grouping = Grouping()
    grouping.add("gpu1", tails)
    done = grouping.document(started="", finished="", pattern="", gaps=())
    assert "\x1b" not in "\n".join(line.plain for line in find_format("tail", "table").lines(done))
    for piece in find_format("tail", "json").render(done):
        piece.encode()


DOC = made(
    "gpu003",
    process(0, REDUCE, LOAD, threads_at={"Thread-1 (loader)": LOAD}, native_at=REDUCE),
    process(None, None, start_s=7),
    instead=["python3 x.py (pid 7, user bob)"],
)
DOC["witnesses"] = {
    **kernel(("oom", 312, 1003, "Out of memory: Killed process 1003 (python)")),
    **gpus(gpu(1000, 97, 0)),
    **network(port(800_000_000)),
    **ras(("gpu003", 1000, 0), missing=[("a", 1, "dead")]),
}
DOC["processes"][0] |= {
    "switches": [7, 170], "calls": [9, 990], "main_cpu_s": [0.5, 0.75],
    "waits_on": "read of /data/x (nfs4)", "locals": ["step: number = 7"],
    "witnesses": {**waits(), **log("[PG ID 0] watchdog", path="/l", reports=[status(0, 41, 41)])},
    "below": [
        {"pid": 77, "parent": 1000, "kind": "loader worker", "command": "python", "state": "S",
         "wait_channel": "do_wait", "cpu_s": [0.5], "waits_on": "wait for child 78 (gcc)",
         "main": 0, "error": ""},
    ],
}  # fmt: skip


def grouped(text: str) -> None:
    try:
        document = trace.parse(text, "gpu003")
    except trace.TraceError as problem:
        one_line(str(problem))
        return
    together = group.group([document], {})
    shown = "\n".join(line.plain for line in find_format("stacks", "table").lines(together))
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    for name in ("json", "html"):
        for piece in find_format("stacks", name).render(together):
            piece.encode()


def unpacked(text: str) -> None:
    try:
        stacks.unpack(text, "N")
    except ProbeError as problem:
        one_line(problem.reason)


def looks(profile: str) -> st.SearchStrategy[str]:
    whole = recorded(profile)
    names = st.sampled_from([name for name, text in whole.items() if text])
    return names.flatmap(
        lambda name: mutated(whole[name]).map(lambda text: look({**whole, name: text}, RECORDED))
    )


def packed_looks() -> st.SearchStrategy[str]:
    text = look(recorded("h100"), RECORDED)
    packed = text.split("\n")[2]
    return mutated(text, envelope("A" * 400, RECORDED), envelope(packed[:200], RECORDED))


def row_texts(name: str) -> st.SearchStrategy[str]:
    row = asdict(KINDS[name])
    line = f"N {name} {json.dumps(row)}\n"
    values = spoiled(row).map(lambda answer: f"N {name} {json.dumps(answer)}\n")
    return st.one_of(mutated(line, line * 3), values)


#: What a node answers -> mutated answers, and what reads them.
ANSWERS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], None]]] = {
    "a section of h100": (looks("h100"), judged),
    "a section of mi300x": (looks("mi300x"), judged),
    "the envelope of a look": (packed_looks(), judged),
    **{f"a row {name}": (row_texts(name), partial(read_row, name=name)) for name in KINDS},
    "the tail of logs": (spoiled(asdict(TAIL)), read_logs),
    "a trace": (st.one_of(mutated(json.dumps(DOC)), spoiled(DOC).map(json.dumps)), grouped),
    "a packed trace": (mutated(f"motd N {stacks.pack(DOC)}\n"), unpacked),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_mutated_answer_is_an_observation_or_one_line(name, effort):
    answers, read = ANSWERS[name]

    @given(answers)
    def each(answer: Any) -> None:
        read(answer)

    DO[effort](each, 600)
