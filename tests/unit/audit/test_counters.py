"""The counters of a look at a node, which the next look is compared with."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass

import pytest

from nodeready.audit import counters
from nodeready.lab.adapters import IB_CLASS, a100, ib_tree
from nodeready.policy import Policy
from nodeready.subjects.base import Output, Unknown
from nodeready.subjects.context import (
    CounterSample,
    boot_id_of,
    counter_sample,
    earlier_counters,
)
from nodeready.subjects.fleet import ALONE
from nodeready.subjects.rdma import facts as rdma
from nodeready.subjects.snapshot import Snapshot

BOOT, OTHER = "b00f5f6e-0000-4000-8000-000000000001", "b00f5f6e-0000-4000-8000-000000000002"


@dataclass(frozen=True)
class Host:
    """As much of a host as matters here."""

    boot_id: str | None


@pytest.fixture
def state(tmp_path, monkeypatch):
    """The directory of the counters."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "nodeready" / "counters"


def snapshot_of(boot_id: str | None = BOOT, downed: int = 0) -> Snapshot:
    files = ib_tree(a100()[:1], mlx5_0={"counters": {"link_downed": str(downed)}})
    text = "".join(f"{IB_CLASS}/{path}:{line}" for path, line in files.items())
    devices = rdma.parse({"rdma": Output(text, 0)}, Policy())
    return Snapshot({"rdma": devices, "host": Host(boot_id), "nics": Unknown("timed out")})


def keep(samples: dict[str, CounterSample]) -> str:
    newest = max(sample.time for sample in samples.values())
    return counters.keep(samples, lambda name: counters.sample_text(samples[name]), newest)


def load(names: list[str]) -> dict[str, CounterSample]:
    """The samples that were kept of these nodes."""
    with counters.EarlierCounters(names) as earlier:
        samples = {name: counters.parse_sample(earlier.text(name)) for name in names}
    return {name: sample for name, sample in samples.items() if sample is not None}


def sample_of(snapshot: Snapshot, moment_s: float = 1000.0) -> CounterSample | None:
    return counter_sample(snapshot, boot_id_of(snapshot), ALONE, moment_s)


LOOK = sample_of(snapshot_of())
ONE = CounterSample(BOOT, {"rdma": (1000.0, {"a": 1})})


def test_the_next_look_has_the_counters_of_the_last(state):
    assert load(["gpu1"]) == {}
    assert keep({"gpu1": LOOK}) == ""
    (line,) = next(state.iterdir()).read_text().splitlines()
    name, _, data = line.split("\t")
    assert (json.loads(name), json.loads(data)["boot_id"]) == ("gpu1", BOOT)
    earlier = load(["gpu1", "gpu2"])
    assert list(earlier) == ["gpu1"]
    before = earlier_counters(earlier["gpu1"], BOOT, 1060.5)["rdma"]
    assert before.seconds == 60.5
    assert before.values["mlx5_0/1.link_downed"] == 0
    keep({"gpu1": sample_of(snapshot_of(downed=3), 2000.0)})
    assert load(["gpu1"])["gpu1"].taken["rdma"][1]["mlx5_0/1.link_downed"] == 3
    # A look at one subject keeps the other, of the same boot.
    keep({"gpu1": CounterSample(BOOT, {"nics": (1.0, {"eth0.rx_errors": 4})})})
    assert sorted(load(["gpu1"])["gpu1"].taken) == ["nics", "rdma"]
    keep({"gpu1": sample_of(snapshot_of(OTHER))})
    assert sorted(load(["gpu1"])["gpu1"].taken) == ["rdma"]


def test_another_boot_or_clock_has_no_history():
    rdma_alone = {"rdma": snapshot_of()["rdma"]}
    for snapshot, now in (
        (snapshot_of(OTHER), 2000.0),
        (snapshot_of(None), 2000.0),
        (snapshot_of(""), 2000.0),
        (Snapshot(rdma_alone), 2000.0),
        (Snapshot({**rdma_alone, "host": Unknown("timed out")}), 2000.0),
        (snapshot_of(), 999.0),
    ):
        assert earlier_counters(LOOK, boot_id_of(snapshot), now) == {}
    assert earlier_counters(None, BOOT, 2000.0) == {}


def test_nothing_to_keep():
    unknown = Snapshot({"host": Host(BOOT), "rdma": Unknown("timed out")})
    for snapshot in (snapshot_of(None), Snapshot({"host": Host(BOOT)}), unknown):
        assert sample_of(snapshot) is None


def test_names_are_data(state):
    names = ["../../x", "a/b", "a\tb\nc", "\x1b[31m", "é\udcff", "", "x" * 5000, "@local"]
    assert keep(dict.fromkeys(names, ONE)) == ""
    assert load(names) == dict.fromkeys(names, ONE)
    assert {path.parent for path in state.parents[1].rglob("*") if path.is_file()} == {state}
    for path in state.iterdir():
        assert len(path.name) == 2
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_other_nodes_stay_and_old_ones_go(state):
    names = [f"gpu{number:04}" for number in range(500)]
    keep(dict.fromkeys(names, ONE))
    assert len(list(state.iterdir())) == counters.FILES
    keep({"gpu0007": CounterSample(OTHER, {"rdma": (2000.0, {"a": 2})})})
    assert len(load(names)) == 500
    for late, count in ((1000.0 + counters.KEPT_S, 500), (1000.0 + counters.KEPT_S + 1, 499)):
        keep({name: CounterSample(BOOT, {"rdma": (late, {})}) for name in names[:499]})
        assert len(load(names)) == count


ROW = '"gpu1"\t1000\t{"boot_id":"b","taken":{"rdma":[1000.0,{"a":1}]}}\n'
DAMAGED = {
    "empty": "",
    "no end": ROW[:-1],
    "half": f"{ROW[:30]}\n",
    "deep": '"gpu1"\t1\t' + "[" * 100_000 + "\n",
    "null": '"gpu1"\t1\tnull\n',
    "a number as the boot": ROW.replace('"b"', "7"),
    "no boot": '"gpu1"\t1\t{"taken":[]}\n',
    "NaN": ROW.replace("[1000.0", "[NaN"),
    "infinity": ROW.replace("[1000.0", "[1e999"),
    "a text as a counter": ROW.replace(":1}", ':"1"}'),
    "a boolean as a counter": ROW.replace(":1}", ":true}"),
    "a very large counter": ROW.replace(":1}", f":{'9' * 9999}}}"),
}


@pytest.mark.parametrize("name", [*DAMAGED, "no UTF-8"])
def test_a_damaged_row_is_as_if_it_were_not_there(state, name):
    content = DAMAGED.get(name, "").encode() or b"\xff\xfe\x00" * (name == "no UTF-8")
    look = CounterSample("b", {"rdma": (1000.0, {"a": 1})})
    keep({"gpu1": look})
    (path,) = state.iterdir()
    assert path.read_text() == ROW
    path.write_bytes(content)
    assert load(["gpu1"]) == {}
    # Other rows of the file stay.
    path.write_bytes(content + b"\n" + ROW.encode())
    assert load(["gpu1"]) == {"gpu1": look}
    assert keep({"gpu1": look}) == ""
    assert load(["gpu1"]) == {"gpu1": look}


def test_a_file_that_cannot_be_read_or_written_is_no_error(state):
    keep({"gpu1": ONE})
    (path,) = state.iterdir()
    for make in (os.mkfifo, os.mkdir, lambda place: os.symlink("/dev/zero", place)):
        (path.rmdir if path.is_dir() else path.unlink)()
        make(path)
        assert load(["gpu1"]) == {}
        assert str(path) in keep({"gpu1": ONE})
    path.unlink()
    state.rmdir()
    state.write_text("a file where the directory belongs")
    assert load(["gpu1"]) == {}
    assert str(state) in keep({"gpu1": ONE})
