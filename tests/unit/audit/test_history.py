"""What is kept of a look at a node, and what the next look makes of it."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import pytest

from nodeready.audit import run
from nodeready.lab.hardware import IB_CLASS, a100, ib_tree
from nodeready.policy import Policy
from nodeready.subjects.base import Counters, Output, Unknown
from nodeready.subjects.context import Counted, counted, with_counters
from nodeready.subjects.rdma import facts as rdma
from nodeready.subjects.snapshot import Snapshot

BOOT, OTHER = "b00f5f6e-0000-4000-8000-000000000001", "b00f5f6e-0000-4000-8000-000000000002"


@dataclass(frozen=True)
class Host:
    """As much of a host as matters here."""

    boot_id: str | None


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the looks."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "nodeready" / "counters"


def seen(boot_id: str | None = BOOT, downed: int = 0) -> Snapshot:
    files = ib_tree(a100()[:1], mlx5_0={"counters": {"link_downed": str(downed)}})
    text = "".join(f"{IB_CLASS}/{path}:{line}" for path, line in files.items())
    found = rdma.parse({"rdma": Output(text, 0)}, Policy())
    return Snapshot({"rdma": found, "host": Host(boot_id), "nics": Unknown("timed out")})


def kept(snapshot: Snapshot, now: float) -> Counted:
    found = counted(snapshot, now)
    assert found is not None
    return found


def before(snapshot: Snapshot) -> Counters | None:
    found: rdma.Rdma = snapshot["rdma"]
    return found.before


def test_the_next_look_sees_the_last_one(state: Path) -> None:
    assert run.previous(["gpu1"]) == {}
    assert run.keep({"gpu1": kept(seen(), 1000.0)}) == ""
    earlier = run.previous(["gpu1", "gpu2"])
    assert list(earlier) == ["gpu1"]
    counters = before(with_counters(seen(downed=3), earlier["gpu1"], 1060.5))
    assert counters is not None
    assert counters.seconds == 60.5
    assert counters.values["mlx5_0/1.link_downed"] == 0
    run.keep({"gpu1": kept(seen(downed=3), 2000.0)})
    assert run.previous(["gpu1"])["gpu1"].taken["rdma"][1]["mlx5_0/1.link_downed"] == 3


@pytest.mark.parametrize(
    ("snapshot", "now"),
    [
        (seen(OTHER), 2000.0),
        (seen(None), 2000.0),
        (seen(""), 2000.0),
        (Snapshot({"rdma": seen()["rdma"]}), 2000.0),
        (Snapshot({"rdma": seen()["rdma"], "host": Unknown("timed out")}), 2000.0),
        (seen(), 999.0),
    ],
)
def test_another_boot_or_clock_has_no_history(snapshot: Snapshot, now: float) -> None:
    assert before(with_counters(snapshot, kept(seen(), 1000.0), now)) is None


def test_nothing_to_keep() -> None:
    assert counted(seen(None), 1000.0) is None
    assert counted(Snapshot({"host": Host(BOOT)}), 1000.0) is None
    unknown = Snapshot({"host": Host(BOOT), "rdma": Unknown("timed out")})
    assert counted(unknown, 1000.0) is None
    earlier = kept(seen(), 1000.0)
    assert with_counters(unknown, earlier, 2000.0) == unknown
    assert with_counters(unknown, None, 2000.0) == unknown


def test_a_look_at_one_subject_keeps_the_other(state: Path) -> None:
    run.keep({"gpu1": Counted(BOOT, {"nics": (1.0, {"eth0.rx_errors": 4})})})
    run.keep({"gpu1": kept(seen(), 1000.0)})
    assert sorted(run.previous(["gpu1"])["gpu1"].taken) == ["nics", "rdma"]
    run.keep({"gpu1": kept(seen(OTHER), 1000.0)})
    assert sorted(run.previous(["gpu1"])["gpu1"].taken) == ["rdma"]


def test_names_are_data(state: Path) -> None:
    names = ["../../x", "a/b", "a\tb\nc", "\x1b[31m", "é\udcff", "", "x" * 5000, "@local"]
    look = Counted(BOOT, {"rdma": (1000.0, {"a": 1})})
    assert run.keep(dict.fromkeys(names, look)) == ""
    assert run.previous(names) == dict.fromkeys(names, look)
    assert {path.parent for path in state.parents[1].rglob("*") if path.is_file()} == {state}
    for path in state.iterdir():
        assert len(path.name) == 2
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_other_nodes_stay_and_old_ones_go(state: Path) -> None:
    names = [f"gpu{at:04}" for at in range(500)]
    look = Counted(BOOT, {"rdma": (1000.0, {"a": 1})})
    run.keep(dict.fromkeys(names, look))
    assert len(list(state.iterdir())) == run.FILES
    run.keep({"gpu0007": Counted(OTHER, {"rdma": (2000.0, {"a": 2})})})
    assert len(run.previous(names)) == 500
    late = 1000.0 + run.KEPT_S + 1
    run.keep({name: Counted(BOOT, {"rdma": (late, {})}) for name in names[:499]})
    assert len(run.previous(names)) == 499


GOOD = '"gpu1"\t1000\t{"boot_id":"b","taken":{"rdma":[1000.0,{"a":1}]}}\n'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        GOOD.encode()[:-1],
        GOOD.encode()[:30] + b"\n",
        b'"gpu1"\t1\t' + b"[" * 100_000 + b"\n",
        b'"gpu1"\t1\t{"boot_id":"b","taken":{"rdma":[NaN,{"a":1}]}}\n',
        b'"gpu1"\t1\t{"boot_id":"b","taken":{"rdma":[1e999,{"a":1}]}}\n',
        b'"gpu1"\t1\t{"boot_id":"b","taken":{"rdma":[1,{"a":"1"}]}}\n',
        b'"gpu1"\t1\t{"boot_id":"b","taken":{"rdma":[1,{"a":true}]}}\n',
        b'"gpu1"\t1\t{"boot_id":"b","taken":{"rdma":[1,{"a":' + b"9" * 9999 + b"}]}}\n",
        b'"gpu1"\t1\t{"boot_id":7,"taken":{}}\n',
        b'"gpu1"\t1\t{"taken":[]}\n',
        b'"gpu1"\t1\tnull\n',
    ],
)
def test_a_damaged_file_is_as_if_it_were_not_there(state: Path, content: bytes) -> None:
    look = Counted("b", {"rdma": (1000.0, {"a": 1})})
    run.keep({"gpu1": look})
    (path,) = state.iterdir()
    assert path.read_text() == GOOD
    path.write_bytes(content)
    assert run.previous(["gpu1"]) == {}
    # What else is in it stays.
    path.write_bytes(content + b"\n" + GOOD.encode())
    assert run.previous(["gpu1"]) == {"gpu1": look}
    assert run.keep({"gpu1": look}) == ""
    assert run.previous(["gpu1"]) == {"gpu1": look}


def test_what_cannot_be_read_or_written_is_no_error(state: Path) -> None:
    look = Counted(BOOT, {"rdma": (1000.0, {"a": 1})})
    run.keep({"gpu1": look})
    (path,) = state.iterdir()
    for make in (os.mkfifo, os.mkdir, lambda p: os.symlink("/dev/zero", p)):
        (path.rmdir if path.is_dir() else path.unlink)()
        make(path)
        assert run.previous(["gpu1"]) == {}
        assert str(path) in run.keep({"gpu1": look})
    path.unlink()
    state.rmdir()
    state.write_text("a file where the directory belongs")
    assert run.previous(["gpu1"]) == {}
    assert str(state) in run.keep({"gpu1": look})


def test_an_unknown_subject_of_another_version_is_passed_over() -> None:
    earlier = Counted(BOOT, {"later": (1.0, {"a": 1}), "nics": (1.0, {"eth0.rx_errors": 1})})
    assert with_counters(seen(), earlier, 2.0) == seen()


def test_what_is_written_is_plain_json(state: Path) -> None:
    run.keep({"gpu1": kept(seen(), 1000.0)})
    (line,) = next(state.iterdir()).read_text().splitlines()
    name, _, data = line.split("\t")
    assert json.loads(name) == "gpu1"
    assert json.loads(data)["boot_id"] == BOOT
