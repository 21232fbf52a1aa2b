"""What the commands keep in the memory."""

import re
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from nodeready.agent.audit_document import Audit, NodeReport
from nodeready.cli.screen import Screen
from nodeready.core.exit_codes import Refused
from nodeready.core.policy import Policy, SiteCheck
from nodeready.core.result import Result
from nodeready.runs.audit import command, workers
from nodeready.runs.audit.recorded import VERDICT
from nodeready.runs.memory.kept_looks import LookKeeper, MemorySettings
from nodeready.runs.memory.store import Memory
from nodeready.runs.postmortem.document import CAUSE_KINDS, KERNEL, LOG, FirstFailure, Postmortem
from nodeready.runs.postmortem.first_failure import HARDWARE
from nodeready.runs.smoke.document import SmokeReport
from nodeready.runs.smoke.knowledge import SmokeSuspect
from nodeready.subjects.registry import SUBJECTS
from tests.builders.hostile import recorded, shows
from tests.builders.results import ok, unknown
from tests.fake import Does, hangs, interrupts, one_by_one
from tests.unit.audit.test_workers import POLICY, nodes_of
from tests.unit.commands import AWAY, SOUND

#: A node whose memory is another one: as after a fault of a module.
TOTAL = re.compile(r"MemTotal: +\d+")
SMALLER = shows({n: TOTAL.sub("MemTotal:  1000000", t) for n, t in recorded("h100").items()})
#: The end of each of the site's checks, by its place among those that a look makes.
SITE = "".join(f"{number} r 0\n" for number in range(3))
MEMORY_MB = "host.memory_total_mb"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state" / "nodeready" / "memory.db"


@pytest.fixture
def memory(state: Path) -> Callable[[], Memory]:
    return lambda: Memory.open(state)


def texts(path: Path) -> dict[tuple[str, str], str]:
    """(node, section) -> its text."""
    with sqlite3.connect(path) as plain:
        rows = plain.execute(
            "SELECT name, section, data FROM current JOIN contents ON contents.id=content"
            " JOIN nodes ON nodes.id=node"
        ).fetchall()
    return {(node, section): zlib.decompress(data).decode() for node, section, data in rows}


def test_an_audit_is_kept(run, memory):
    nodes = {"gpu1": one_by_one(SOUND, SOUND, SMALLER, AWAY), "gpu2": SOUND, "off": AWAY}
    codes = [run(nodes, "audit").code for _ in range(4)]
    with memory() as kept:
        looks = kept.looks()
        assert [(look.command, look.complete, look.code) for look in reversed(looks)] == [
            ("audit", True, code) for code in codes
        ]
        assert looks[0].summary["nodes"]["unreachable"] == 2
        life = [*kept.life("gpu1")]
        # The second look changes some results: it has the counters of the first one.
        sizes = {node.look: node.facts[MEMORY_MB] for node in life}
        assert (sizes[3], sizes[4]) == (976, 976)
        assert sizes[1] == sizes.get(2, sizes[1]) > 976
        assert [bool(node.error) for node in life if node.look in (3, 4)] == [False, True]
        off = kept.node("off", time.time())
        assert (off.error, off.unreachable, dict(off.facts)) == ("n: no answer in 15 s", True, {})
        gpus = [span for span in kept.parts_of("gpu2") if span.kind == "gpu"]
        # Both nodes are recordings of one node, so that each GPU was seen in both.
        homes = [{span.node for span in kept.parts(gpu.serial)} for gpu in gpus]
        assert homes == 8 * [{"gpu1", "gpu2"}]


def test_a_page_has_the_trend_of_its_command_and_inventory(run):
    nodes = {"gpu1": SOUND, "gpu2": SOUND}
    run(nodes, "ready")
    pages = [run(nodes, "audit", "--format", "html").out for _ in range(2)]
    assert ["looks since" in page for page in pages] == [False, True]
    assert "2 looks since" in pages[1]


def test_the_memory_is_the_same_whichever_process_reads(run, monkeypatch, tmp_path):
    memories = []
    for count in (0, 3):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / str(count)))
        monkeypatch.setattr(workers, "worker_count", lambda nodes, count=count: count)
        nodes = nodes_of(3)
        for _ in range(2):
            run(nodes, "audit", policy=POLICY)
        memories.append(texts(tmp_path / str(count) / "nodeready" / "memory.db"))
    assert memories[0] == memories[1]
    assert len(memories[0]) > 200


def test_a_look_at_some_checks_keeps_the_rest(run, memory):
    nodes = {"gpu1": one_by_one(SOUND, SOUND, SMALLER, SMALLER)}
    run(nodes, "audit")
    run(nodes, "audit")
    with memory() as kept:
        before = kept.node("gpu1", time.time())
        facts = dict(before.facts)
    # The memory has all results of a probed subject, except those of skipped checks.
    run(nodes, "audit", "--only", "host.kernel")
    run(nodes, "audit", "--only", "host", "--skip", "host.memory")
    with memory() as kept:
        after = kept.node("gpu1", time.time())
        changed = {key for key, value in facts.items() if after.facts.get(key) != value}
    assert changed == {MEMORY_MB}
    assert {*before.results} - {*after.results} == {"host.memory"}
    assert before.counters == after.counters != {}


HELLO, WORLD, LATER = (
    SiteCheck(
        name, run="true", file="", json="", comparator="status", expected=expected, moments=m
    )
    for name, expected, m in (
        ("hello", 0, ("audit", "ready")),
        ("world", 7, ("audit", "ready")),
        ("later", 7, ("ready",)),
    )
)


def test_the_checks_of_a_site_are_kept_each_on_its_own(run, memory):
    """What a look did not make stays; what no policy declares any more leaves."""

    def statuses() -> dict[str, str]:
        with memory() as kept:
            results = kept.node("gpu1", time.time()).results
        return {name: result.status for name, result in results.items() if name[:5] == "site."}

    nodes = {"gpu1": shows({**recorded("h100"), "site": SITE})}
    every = Policy(site_checks=(HELLO, WORLD, LATER))
    both = {"site.hello": "ok", "site.world": "fail"}
    run(nodes, "audit", policy=every)
    assert statuses() == both
    run(nodes, "audit", "--only", "site.hello", policy=every)
    run(nodes, "audit", "--only", "host", policy=every)
    assert statuses() == both
    run(nodes, "ready", "--only", "site", "--budget", "5", policy=every)
    assert statuses() == {**both, "site.later": "fail"}
    run(nodes, "audit", policy=every)
    assert statuses() == {**both, "site.later": "fail"}
    run(nodes, "audit", "--skip", "site.world", policy=every)
    assert statuses() == {"site.hello": "ok", "site.later": "fail"}
    run(nodes, "audit", policy=Policy(site_checks=(HELLO,)))
    assert statuses() == {"site.hello": "ok"}
    with memory() as kept:
        facts = kept.node("gpu1", time.time()).facts
        assert not [key for key in facts if key.startswith("site.")]


def test_an_interrupted_look_keeps_what_it_has_seen(run, memory):
    nodes: dict[str, Does] = {"a": SOUND, "b": interrupts, "c": SOUND}
    assert run(nodes, "audit").code == 130
    with memory() as kept:
        (look,) = kept.looks()
        assert (look.complete, look.code, kept.names()) == (False, 130, ["a"])


def test_ready_keeps_its_proofs_until_the_next_look(run, memory):
    run({"gpu1": SOUND}, "ready", "--budget", "5", "--skip", "host.kernel")
    run({"gpu1": SOUND}, "audit")
    with memory() as kept:
        ready, audit = kept.life("gpu1")
        assert [look.command for look in kept.looks()] == ["audit", "ready"]
    assert "proof.user" in ready.results
    assert "host.kernel" not in ready.results
    assert "proof.user" not in audit.results
    assert "host.kernel" in audit.results


@pytest.mark.parametrize("command", ["audit", "ready"])
@pytest.mark.parametrize("name", ["memory.db", "x" * 300])
def test_a_look_that_cannot_be_kept_is_one_line(run, state, monkeypatch, command, name):
    kept = run({"gpu1": SOUND}, command)
    state.unlink()
    state.mkdir()
    state = state.with_name(name)
    monkeypatch.setenv("NODEREADY_MEMORY", str(state))
    lost = run({"gpu1": SOUND}, command, "-q")
    assert (lost.code, lost.out[:20]) == (kept.code, kept.out[:20])
    (line,) = [line for line in lost.err.splitlines() if "kept" in line]
    assert line.startswith(f"nodeready: this look was not kept: {state}: ")
    assert line.endswith("NODEREADY_MEMORY names another file, or off")


def test_nothing_is_kept_when_it_is_off(run, state, monkeypatch):
    monkeypatch.setenv("NODEREADY_MEMORY", "off")
    done = run({"gpu1": SOUND}, "audit")
    assert "kept" not in done.err
    assert not state.exists()


def test_watch_keeps_changed_looks_alone(run, memory, monkeypatch):
    steps: Iterator[None] = iter([None, None, None])

    def sleep(seconds: float) -> None:
        try:
            next(steps)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(command.time, "sleep", sleep)
    nodes = {"gpu1": one_by_one(SOUND, SOUND, hangs, hangs)}
    assert run(nodes, "audit", "--watch", "1").code == 130
    with memory() as kept:
        assert len(kept.looks()) == 2


@pytest.mark.parametrize(
    ("days", "words"), [(3650.5, "3650 days ahead of"), (-3650.5, "3650 days behind")]
)
def test_a_clock_that_was_set_is_named_and_removes_nothing(run, memory, monkeypatch, days, words):
    assert "clock" not in run({"gpu1": SOUND}, "audit").err + run({"gpu1": SMALLER}, "audit").err
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + days * 86400)
    done = run({"gpu1": SOUND}, "audit", "-q")
    (line,) = [line for line in done.err.splitlines() if "clock" in line]
    assert line == (
        f"nodeready: this machine's clock is {words} that of the last look: is it right? "
        "(timedatectl) No look is removed in the next 90 days"
    )
    assert "clock" not in run({"gpu1": SOUND}, "audit").err
    with memory() as kept:
        assert len(kept.looks()) == 4


SETTINGS: dict[str, tuple[dict[str, str], str, Any]] = {
    "a file": ({"": "/var/m.db", "_DAYS": "3"}, "", (Path("/var/m.db"), 3, 2000)),
    "off": ({"": "off"}, "", (None, 90, 2000)),
    "the file of the configuration": (
        {"_MEGABYTES": "7"},
        '[memory]\nfile = "/srv/m.db"\ndays = 30\n',
        (Path("/srv/m.db"), 30, 7),
    ),
    "a relative file": ({"": "m.db"}, "", "memory: file m.db: write the whole path, or off"),
    "the home of no user": ({"": "~nobody.here/m.db"}, "", "write the whole path, or off"),
    "no days": ({"_DAYS": "0"}, "", "memory: days 0: must be a number from 1"),
    "a wrong key": ({}, "[memory]\ndais = 3\n", "unknown option dais: did you mean days?"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_settings_of_the_memory(name, tmp_path, monkeypatch):
    variables, config, expected = SETTINGS[name]
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "nodeready").mkdir()
    (tmp_path / "nodeready" / "config.toml").write_text(config)
    for suffix, value in variables.items():
        monkeypatch.setenv(f"NODEREADY_MEMORY{suffix}", value)
    if isinstance(expected, str):
        with pytest.raises(Refused, match=re.escape(expected)):
            MemorySettings.load()
    else:
        settings = MemorySettings.load()
        assert (settings.path, settings.days, settings.megabytes) == expected


def test_opt_in_checks_are_kept_where_they_were_made(run, memory):
    run({"gpu1": SOUND}, "audit")
    checks = (check for subject in SUBJECTS.values() for check in subject.checks)
    opt_in = {check.id for check in checks if check.opt_in}
    with memory() as kept:
        assert not opt_in & kept.node("gpu1", time.time()).results.keys()


def test_recorded_verdicts_are_kept_without_facts(memory, run):
    run({"gpu1": SOUND}, "audit")
    bad = Result("host.memory", "fail", "2 TB", "1 TB")
    nodes = (
        NodeReport.of("gpu1", [bad, ok(VERDICT)]),
        # A verdict that is not believed says nothing about the node.
        NodeReport.of("gpu2", [unknown(VERDICT, "its verdict is 3 h old")]),
    )
    audit = Audit("2026-01-01T00:00:00Z", "2026-01-01T00:00:01Z", "ab", nodes)
    LookKeeper(Screen(), "audit", "prod.py").keep_audit(audit, 3, None)
    with memory() as kept:
        assert kept.names() == ["gpu1"]
        node = kept.node("gpu1", time.time())
        assert node.results["host.memory"] == bad
        assert node.results["host.kernel"].status == "ok"
        assert node.facts


def made(kind: Any, **values: Any) -> Any:
    return kind(**{field.name: None for field in fields(kind)} | {"complete": True} | values)


def test_suspects_and_causes_are_events(memory, run):
    run({"gpu1": SOUND}, "audit")
    keeper = LookKeeper(Screen(), "smoke", "prod.py")
    suspects = (
        SmokeSuspect("gpu", ("gpu1",), (0,), ("[3] fails", "[4] passes")),
        SmokeSuspect("scale", ("gpu1", "gpu2"), (), ("[5] fails",)),
        SmokeSuspect("pair", ("gpu1", "gpu2"), (), ("[6] fails",)),
    )
    keeper.keep_smoke(made(SmokeReport, suspects=suspects), 3)
    with memory() as kept:
        events = [(event.node, event.kind, event.text) for event in kept.events()]
        (on_gpu,) = [event for event in kept.events() if event.serial]
        gpus = {part.serial for part in kept.parts_of("gpu1") if part.kind == "gpu"}
    assert events == [
        ("gpu2", "smoke-pair", "pair: [6] fails"),
        ("gpu1", "smoke-pair", "pair: [6] fails"),
        ("gpu1", "smoke-suspect", "gpu: [3] fails"),
    ]
    assert on_gpu.serial in gpus


@pytest.mark.parametrize("kind", CAUSE_KINDS)
def test_a_cause_is_an_event_of_its_nodes_with_its_witness(memory, run, kind):
    run({"gpu1": SOUND}, "audit")
    cause = FirstFailure(kind, "rank 3 crashed", (3,), ("gpu1", "forged"))
    # (who saw it there, uid of the job) -> (kind, user) of the event.
    cases = {
        (None, 1001): (f"postmortem-{kind}", ""),
        (LOG, None): (f"postmortem-{kind}", ""),
        (LOG, 1001): (f"postmortem-{kind}", "1001"),
    }
    if kind in HARDWARE.values():
        cases[KERNEL, 1001] = f"confirmed-{kind}", ""
    for witness, uid in cases:
        witnesses = {"gpu1": witness} if witness else {}
        report = made(Postmortem, job="7", cause=cause, witnesses=witnesses)
        LookKeeper(Screen()).keep_postmortem(report, 0, {"gpu1"}, uid)
    with memory() as kept:
        events = kept.events()
    assert {(event.node, event.text) for event in events} == {("gpu1", "job 7: rank 3 crashed")}
    assert [(event.kind, event.user) for event in reversed(events)] == [*cases.values()]


def test_evidence_has_the_history_of_the_node_and_of_its_parts(run):
    nodes = {"gpu1": one_by_one(SOUND, SMALLER)}
    pages = [run(nodes, "audit", "--format", "evidence").out for _ in range(2)]
    assert MEMORY_MB not in pages[0]
    assert f"<td>hardware</td><td>{MEMORY_MB}: " in pages[1]
    assert re.search(r"<td>part</td><td>\w+: in gpu1 at 0000:", pages[1])
