"""The file of the memory: what was reported as kept is there, whatever happens to the writer."""

import fcntl
import os
import random
import resource
import signal
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from nodeready.core.result import Result
from nodeready.runs.memory import store
from nodeready.runs.memory.look import Event, Look, NodeSections, dump, node_sections, results_text
from nodeready.runs.memory.store import ControlClock, Memory, MemoryUnavailable

DAY = 86400.0
FAIL = Result("gpus.ecc", "fail", "0", "7 errors", "nvidia-smi", "replace it", "admin")
OK = Result("gpus.ecc", "ok", "0", "0")


def look(time_s: float = DAY, **changes: Any) -> Look:
    values = {"command": "audit", "inventory": "prod.py", "policy_digest": "ab", "code": 0}
    return Look(0, time_s, complete=True, summary={"nodes": {"ok": 1}}, **{**values, **changes})


def state(
    name: str = "gpu1", mtu: int = 9000, *, boot: str = "b1", results: tuple[Result, ...] = (OK,),
    gpus: Mapping[str, str] | None = None, errors: int | None = None, **more: bytes,
) -> NodeSections:  # fmt: skip
    texts = {
        "boot": dump(boot),
        "nics.facts": dump({"nics.interfaces[eth0].mtu": mtu}),
        "gpus.results": results_text(results, {result.check for result in results}),
    }
    if gpus is not None:
        texts["gpus.parts"] = dump([["gpu", serial, "", slot] for serial, slot in gpus.items()])
    if errors is not None:
        texts["nics.counters"] = dump({"eth0.rx_errors": errors})
    return node_sections(name, {**texts, **more}, ("nics",) if errors is not None else ())


def away(name: str = "gpu1", error: str = "no answer in 15 s") -> NodeSections:
    return node_sections(name, {"error": dump([error, True])})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "memory.db"


@pytest.fixture
def memory(path: Path) -> Iterator[Memory]:
    with Memory.open(path, make=True) as opened:
        yield opened


def keep(memory: Memory, *days: Any) -> None:
    """Keep a look each day; a day has a state, or several."""
    for day, states in enumerate(days, 1):
        memory.keep(look(day * DAY), [states] if isinstance(states, NodeSections) else states)


def test_the_file_is_private_and_its_own(memory, path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with sqlite3.connect(path) as plain:
        # WAL's shared memory does not work over NFS.
        assert plain.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_a_node_is_known_at_any_time(memory):
    keep(memory, state(mtu=1500), state(mtu=1500), state(mtu=9000, boot="b2"), state("gpu2"))
    assert memory.node("gpu1", DAY - 1) is None
    assert memory.node("gpu3", 9 * DAY) is None
    for time_s, seen_s, mtu, boot in (
        (1.5 * DAY, DAY, 1500, "b1"),
        (2 * DAY, 2 * DAY, 1500, "b1"),
        (3 * DAY, 3 * DAY, 9000, "b2"),
        (99 * DAY, 3 * DAY, 9000, "b2"),
    ):
        node = memory.node("gpu1", time_s)
        assert (node.time_s, node.boot_id) == (seen_s, boot)
        assert dict(node.facts) == {"nics.interfaces[eth0].mtu": mtu}
    assert "nics.x" not in node.facts
    assert memory.changed(2.5 * DAY, 3.5 * DAY) == {"gpu1"}
    assert memory.changed(3.5 * DAY) == {"gpu2"}
    assert [node.node for node in memory.nodes(memory.names(), 9 * DAY)] == ["gpu1", "gpu2"]
    assert [kept.id for kept in memory.looks(2 * DAY, 3 * DAY)] == [3, 2]


def test_a_life_has_each_change_once(memory):
    days = [state(), state(), state(results=(FAIL,)), away(), away(), state(), state()]
    keep(memory, *days)
    life = [
        (node.look, node.number, node.error, node.unreachable, node.results["gpus.ecc"])
        for node in memory.life("gpu1")
    ]
    brief = Result("gpus.ecc", "ok")
    # The rest stays as it was last seen.
    lost = (4, 4, "no answer in 15 s", True, FAIL)
    assert life == [
        (1, 1, "", False, brief),
        (3, 3, "", False, FAIL),
        lost,
        (6, 6, "", False, brief),
    ]
    assert memory.last_seen("gpu1") == (7 * DAY, 7, {})
    assert [*memory.life("gpu9")] == []


def test_equal_nodes_cost_once(memory, path):
    keep(memory, [state(f"gpu{number}") for number in range(100)])
    size = memory.size_bytes
    for day in range(2, 200):
        memory.keep(look(day * DAY), [state(f"gpu{number}") for number in range(100)])
    with sqlite3.connect(path) as plain:
        assert plain.execute("SELECT count(*) FROM contents").fetchone() == (3,)
        assert plain.execute("SELECT count(*) FROM past").fetchone() == (0,)
    assert memory.size_bytes < size + 198 * 300


def test_a_part_is_known_wherever_it_was(memory):
    keep(
        memory,
        [state("gpu1", gpus={"A": "0", "B": "1"}), state("gpu2", gpus={"C": "0"})],
        [state("gpu1", gpus={"A": "0", "D": "1"}), state("gpu2", gpus={"B": "0"})],
        # A tool that shows no GPU at all has not moved them.
        [state("gpu1", gpus={}), state("gpu2", gpus={"B": "0"})],
    )
    rows = [
        (span.node, span.slot, span.first_s / DAY, span.last_s / DAY, span.is_there)
        for span in memory.parts("B")
    ]
    assert rows == [("gpu2", "0", 2, 3, True), ("gpu1", "1", 1, 2, False)]
    assert {span.serial for span in memory.parts_of("gpu1")} == {"A", "B", "D"}


def test_counters_are_of_one_boot(memory):
    keep(memory, state(errors=3), state(errors=3), state(), state(errors=5))
    assert memory.earlier_counters("gpu1") == (
        '{"boot_id":"b1","taken":{"nics":[345600.0,{"eth0.rx_errors":5}]}}'
    )
    assert memory.node("gpu1", 2 * DAY).counters == {"nics.eth0.rx_errors": 3}
    # The look after the boot did not read them.
    memory.keep(look(5 * DAY), [state(boot="b2")])
    assert memory.earlier_counters("gpu1") == '{"boot_id":"b2","taken":{}}'
    assert memory.earlier_counters("gpu9") == ""


def test_the_verdict_of_the_gate_ends_with_the_next_look(memory):
    gate = node_sections("gpu1", {"gate": results_text([FAIL], {FAIL.check})})
    keep(memory, state(), gate, state())
    statuses = [node.results["gpus.ecc"].status for node in memory.life("gpu1")]
    assert statuses == ["ok", "fail", "ok"]


def test_events_are_of_nodes_and_parts(memory):
    event = Event(DAY, "gpu1", "A", "smoke-suspect", "slow", "smoke")
    memory.keep(look(), (), [event, Event(DAY, "gpu2", "", "drain", "by hand", "smoke")])
    assert memory.events("gpu1") == memory.events(serial="A") == [event]
    assert len(memory.events()) == 2


def test_names_are_data(memory):
    names = ["../../x", "a'b", "a\tb\nc\0", "\x1b[31m", "é\udcff", "", "x" * 5000, "%"]
    memory.keep(look(), [state(name) for name in names])
    assert [node.node for node in memory.nodes(names, DAY)] == names


def at(days: float, uptime_days: float | None = None, boot: str = "b1") -> ControlClock:
    """The control machine's clock; uptime_days: None: it has counted the days truly."""
    return ControlClock(days * DAY, boot, (days if uptime_days is None else uptime_days) * DAY)


def test_old_looks_go_and_newest_states_stay(memory):
    for day in range(1, 31):
        event = Event(day * DAY, "gpu1", "", "drain", "by hand", "smoke")
        memory.keep(look(day * DAY), [state("gpu1", mtu=day), state("gpu2")], [event])
        memory.trim(at(day), 10, 1 << 30)
    memory.keep(look(31 * DAY), [state("gpu1", mtu=1)])
    memory.trim(at(31), 10, 1 << 30)
    assert memory.node("gpu1", 8 * DAY) is None
    assert next(memory.life("gpu1")).time_s == DAY
    assert memory.node("gpu1", 22 * DAY).facts["nics.interfaces[eth0].mtu"] == 22
    assert memory.node("gpu2", 31 * DAY).time_s == 30 * DAY
    assert len(memory.looks()) == len(memory.events()) + 1 < 14
    memory.trim(at(36), 10, 1 << 30)
    memory.trim(at(40.5), 10, 1 << 30)
    assert memory.names() == ["gpu1"]


JUMPS = {
    "ten years ahead": (at(3690, 31),),
    "ten years ahead, and back": (at(3690, 31), at(33, 33)),
    "ten years ahead for a month": (*(at(3690 + day, 31 + day) for day in range(30)),),
    "to 1970": (at(0, 31), at(1, 32)),
    "to 1970, and back": (at(0, 31), at(32, 32), at(41, 41)),
    "at a boot": (at(3690, 0, "b2"), at(3691, 1, "b2")),
    "of the second of two machines": (at(3690, 5, "b2"), at(32), at(3691, 6, "b2"), at(33)),
    "on a machine without such files": (at(3690, 0, ""), at(3690.1, 0, "")),
}


@pytest.mark.parametrize("name", JUMPS)
def test_a_clock_that_jumps_removes_nothing(memory, name):
    for day in range(1, 31):
        event = Event(day * DAY, "gpu1", "", "drain", "by hand", "smoke")
        memory.keep(look(day * DAY), [state("gpu1", mtu=day), state("gpu2")], [event])
        memory.trim(at(day), 50, 1 << 30)
    moved_s = []
    for clock in JUMPS[name]:
        memory.keep(look(clock.time_s), [state("gpu1", mtu=0)])
        moved_s.append(memory.trim(clock, 50, 1 << 30))
    assert abs(moved_s[0]) > 29 * DAY
    assert len(memory.looks()) == 30 + len(JUMPS[name])
    assert len(memory.events()) == 30
    assert memory.node("gpu1", 2 * DAY).facts["nics.interfaces[eth0].mtu"] == 2
    # The newest look is the last that was kept, whatever its time.
    assert memory.node("gpu1", float("inf")).facts["nics.interfaces[eth0].mtu"] == 0


def test_looks_of_a_wrong_clock_go_when_the_right_clock_has_passed_them(memory):
    for clock in (at(1), at(2), at(3690, 3), at(4), *map(at, range(5, 40))):
        memory.keep(look(clock.time_s), [state("gpu1", mtu=int(clock.uptime_s))])
        memory.trim(clock, 20, 1 << 30)
    assert sorted(kept.time_s / DAY for kept in memory.looks()) == list(range(18, 40))


@pytest.mark.parametrize("fleet", [2, 5, 10])
def test_a_loud_node_loses_its_own_looks_alone(memory, fleet):
    noise, bound = random.Random(0).randbytes, 4_000_000
    for day in range(1, 25):
        quiet = [state(f"gpu{number}", mtu=day) for number in range(1, fleet)]
        facts = {f"{subject}.facts": dump(noise(120_000).hex()) for subject in "wxyz"}
        memory.keep(look(day * DAY), [*quiet, state("loud", mtu=day, **facts)])
        # Its newest state alone is more than a tenth of the bound.
        memory.trim(at(day), 90, bound)
        assert memory.size_bytes <= bound
    for number in range(1, fleet):
        life = [node.facts["nics.interfaces[eth0].mtu"] for node in memory.life(f"gpu{number}")]
        assert life == list(range(1, 25))
    # It keeps its newest looks.
    assert memory.node("loud", 23 * DAY).facts["nics.interfaces[eth0].mtu"] == 23
    assert "w.facts" not in memory.node("loud", DAY).facts.contents


def test_a_file_of_half_empty_pages_gets_smaller_too(memory):
    """A row of 2.1 kB fills a page of 4 kB, so that the file is twice as large as its texts."""
    noise, bound = random.Random(0).randbytes, 1_000_000
    for day in range(1, 300):
        facts = {"x.facts": dump(noise(2100).hex())}
        memory.keep(look(day * DAY), [state("gpu1", **facts)])
    memory.trim(at(300), 900, bound)
    assert bound / 2 < memory.size_bytes <= bound


def test_every_node_has_some_room_whatever_the_bound(memory):
    for day in range(1, 60):
        memory.keep(look(day * DAY), [state(mtu=day), state("gpu2")])
        memory.trim(at(day), 90, 1)
    assert len([*memory.life("gpu1")]) == 59


def test_a_node_has_a_bounded_number_of_former_parts(memory):
    for day in range(1, 12):
        gpus = {f"{day}-{slot}": f"{slot:03}" for slot in range(100)}
        memory.keep(look(day * DAY), [state("loud", gpus=gpus), state(gpus={str(day): "0"})])
    serials = {part.serial for part in memory.parts_of("loud")}
    assert len(memory.parts_of_kind("gpu")) == store.MAX_PARTS + 11
    # The newest of them stay.
    assert serials >= {f"{day}-{slot}" for day in (10, 11) for slot in range(100)}
    assert [part.serial for part in memory.parts_of("gpu1")] == [*map(str, range(11, 0, -1))]


# --- Trouble.


def intact(path: Path, kept: int) -> None:
    """The file is whole, and has at least this number of looks, each with its nodes."""
    with Memory.open(path) as memory:
        looks = memory.looks()
        assert [kept_look.id for kept_look in looks] == list(range(len(looks), 0, -1))
        assert len(looks) >= kept
        if looks:
            newest = looks[0].time_s
            assert memory.node("gpu1", newest).facts["nics.interfaces[eth0].mtu"] == newest
            assert len([*memory.nodes([f"gpu{n}" for n in range(20)], newest)]) == 20
    with sqlite3.connect(path) as plain:
        assert plain.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def write_looks(path: Path, report: Callable[[int], None], count: int = 10_000) -> None:
    with Memory.open(path, make=True) as memory:
        for _ in range(count):
            number = 1 + len(memory.looks())
            states = [state(f"gpu{n}", mtu=number) for n in range(20)]
            report(memory.keep(look(float(number)), states))


def child(work: Callable[[Callable[[int], None]], None]) -> tuple[int, int]:
    """A process that does this work; its pid, and what it reports, a byte for each look."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work(lambda number: os.write(writing, b"k") and None)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    return pid, reading


def reported(pid: int, reading: int) -> int:
    """The number of looks that an ended process has reported as kept."""
    assert os.waitpid(pid, 0)[1] in (0, signal.SIGKILL)
    count = 0
    while data := os.read(reading, 65536):
        count += len(data)
    os.close(reading)
    return count


def test_no_look_is_lost_when_the_writer_is_killed_at_any_moment(path):
    moments, kept = random.Random(33), 0
    for number in range(50):
        pid, reading = child(lambda report: write_looks(path, report))
        if number % 2:
            # Of the others, some are killed before their first look.
            kept += len(os.read(reading, 1))
        time.sleep(moments.uniform(0, 0.1))
        os.kill(pid, signal.SIGKILL)
        kept += reported(pid, reading)
        if path.exists():
            intact(path, kept)
    assert kept >= 25


def test_two_writers_wait_for_each_other(path):
    def write(report: Callable[[int], None]) -> None:
        with Memory.open(path, make=True) as memory:
            for number in range(40):
                report(memory.keep(look(float(number)), [state(mtu=number)]))

    workers = [child(write) for _ in range(2)]
    assert [reported(*worker) for worker in workers] == [40, 40]
    with Memory.open(path) as memory:
        assert len(memory.looks()) == 80


def test_a_full_disk_keeps_what_was_kept(path):
    """RLIMIT_FSIZE fails like a full disk: a write in the middle of the file is refused."""

    def fill(report: Callable[[int], None]) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(MemoryUnavailable, match="disk"):
            write_looks(path, report)

    kept = reported(*child(fill))
    assert kept > 2
    intact(path, kept)


def test_a_file_system_that_refuses_locks_is_named(memory, path):
    keep(memory, state())
    locker = os.open(path, os.O_RDWR)
    # SQLite's PENDING, RESERVED and SHARED bytes (https://www.sqlite.org/lockingv3.html).
    pid, reading = child(lambda report: hold(locker, report))
    assert os.read(reading, 1) == b"k"
    try:
        with sqlite3.connect(path, timeout=0) as plain, pytest.raises(sqlite3.OperationalError):
            plain.execute("SELECT * FROM looks")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "BUSY_S", 0.1)
            with pytest.raises(MemoryUnavailable, match="locked: NODEREADY_MEMORY names"):
                Memory.open(path)
    finally:
        os.kill(pid, signal.SIGKILL)
        reported(pid, reading)
    with Memory.open(path) as later:
        assert len(later.looks()) == 1


def hold(descriptor: int, report: Callable[[int], None]) -> None:
    fcntl.lockf(descriptor, fcntl.LOCK_EX, 512, 0x40000000)
    report(1)
    time.sleep(60)


def open_to_all(path: Path) -> None:
    path.parent.chmod(0o1777)


def plant_newer(path: Path) -> None:
    Memory.open(path, make=True).__exit__()
    with sqlite3.connect(path) as plain:
        plain.execute("PRAGMA user_version=2")


def plant_foreign(path: Path) -> None:
    with sqlite3.connect(path) as plain:
        plain.execute("CREATE TABLE x(y)")


def plant_torn(path: Path) -> None:
    with Memory.open(path, make=True) as memory:
        keep(memory, *([state(f"gpu{n}", mtu=n * day) for n in range(99)] for day in range(9)))
    data = path.read_bytes()
    path.write_bytes(data[:4096] + b"\xff" * (len(data) - 4096))


PLANTED = {
    "a text": (lambda path: path.write_text("no memory" * 999), "is damaged"),
    "torn": (plant_torn, "is damaged"),
    "of another program": (plant_foreign, "is no memory of nodeready"),
    "newer": (plant_newer, "is of a newer nodeready"),
    "a link": (lambda path: path.symlink_to("/dev/zero"), "is no file of"),
    "a pipe": (os.mkfifo, "is no file of"),
    "a directory": (Path.mkdir, "Is a directory"),
    "another user's": (lambda path: (path.touch(), os.chown(path, 12345, -1)), "is no file of"),
    "in a directory for everybody": (open_to_all, "other users can change"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_file_that_is_no_memory_is_named_and_left_alone(path, name):
    plant, reason = PLANTED[name]
    if name == "another user's" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    path.parent.mkdir(0o700)
    plant(path)
    before = path.lstat() if os.path.lexists(path) else None
    with pytest.raises(MemoryUnavailable, match=reason), Memory.open(path, make=True) as memory:
        keep(memory, state(), state(mtu=1))
    after = path.lstat() if os.path.lexists(path) else None
    assert (before and before.st_mtime) == (after and after.st_mtime)


def test_an_empty_file_becomes_a_memory(path):
    path.parent.mkdir()
    path.touch(0o600)
    with Memory.open(path, make=True) as memory:
        keep(memory, state())
    with pytest.raises(MemoryUnavailable, match="No such file"):
        Memory.open(path.with_name("other"))
