"""What PyTorch's flight recorder wrote: real dumps, those of other versions, and hostile ones."""

import contextlib
import io
import json
import os
import pickle
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from nodeready.agent.witnesses import flight_recorder
from nodeready.agent.witnesses.flight_recorder import NoDumpError, ask_for_dump, observe, parse
from tests.cases import cases, read_data

#: Written by four ranks of torch 2.15 with gloo, as `_dump_fr_trace` and `_dump_fr_trace_json`.
DATA = Path(__file__).parent / "data" / "flight_recorder"
SITE = "train.py:88 step"
ROOT_ONLY = pytest.mark.skipif(os.getuid() != 0, reason="only root looks at others")


def real(name):
    return (DATA / name).read_bytes()


def summary(recording):
    """[group, enqueued, completed], and [group, sequence, operation, site]."""
    groups = [[group.desc, group.enqueued, group.completed] for group in recording.groups]
    calls = [[call.group, call.sequence, call.operation, call.site] for call in recording.entries]
    return groups, calls


@pytest.mark.parametrize("name", sorted(path.name for path in DATA.glob("*_?")))
def test_a_real_dump_is_read_as_python_reads_it(name):
    recording = parse(real(name))
    assert (recording.version, recording.partial) == ("2.10", "status" in name)
    if "json" not in name:
        data = real(name)
        assert flight_recorder.unpickled(data) == (pickle.load(io.BytesIO(data)), False)


def test_sizes_and_types_are_the_inputs_and_the_outputs_and_ranks_of_gloo_are_left_out():
    """Its only configuration has no name: in this dump it is the second group's."""
    assert pickle.loads(real("group_1"))["pg_config"][""]["ranks"] == "[0, 1]"
    assert parse(real("group_1")).groups[0].ranks == ()
    (call,) = parse(real("types_2")).entries
    assert (call.sizes, call.types) == ("[[16], [16]]", "[Double, Double]")
    assert (call.state, call.is_p2p) == ("scheduled", False)


@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", ["late_0", "group_0", "late.json_0"])
def test_a_dump_that_was_cut_off_tells_nothing_that_the_whole_does_not(name, stride, monkeypatch):
    data = real(name)
    whole = parse(data)
    groups = {group.name: group for group in whole.groups}
    for size in range(0, len(data), stride):
        try:
            recording = parse(data[:size])
        except NoDumpError:
            continue
        assert recording.partial
        assert set(recording.entries) <= set(whole.entries), size
        for group in recording.groups:
            assert group.enqueued in (None, groups[group.name].enqueued)
            assert (group.completed or -1) <= groups[group.name].completed
    # As is one of too many steps.
    monkeypatch.setattr(flight_recorder, "_MAX_STEPS", 400)
    assert parse(real("late_0")).partial


def entry(sequence, state="completed", changes=()):
    """An entry of ProcessGroupNCCL's, version 2.4 and newer.

    changes: other fields; `p2p` is the number of a send or a receive in the group pp
    """
    changes = dict(changes)
    number = changes.pop("p2p", None)
    pp = {"pg_id": 2, "process_group": ("5", "pp"), "p2p_seq_id": number, "is_p2p": True}
    numbers = dict.fromkeys(("record_id", "op_id", "collective_seq_id"), sequence)
    base = json.loads(read_data(__file__, "flight_recorder_entry.json"))
    base |= {**numbers, "process_group": ("0", "default_pg")}
    base |= {"state": state, "retired": state == "completed"}
    return {**base, **(pp if number else {}), **changes}


def nccl(*entries, status=None, config=None, version="2.10"):
    """A dump. status: id of a group -> the last enqueued, started and completed."""
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}, **(config or {})}
    dump = {"version": version, "pg_config": groups, "entries": [entry(*row) for row in entries]}
    if status is not None:
        names = [f"last_{word}_collective" for word in ("enqueued", "started", "completed")]
        rows = status.items()
        dump["pg_status"] = {group: dict(zip(names, row, strict=True)) for group, row in rows}
    return dump


@pytest.mark.parametrize("case", cases(__file__, "cases/flight_recorder.json"))
def test_dumps_of_all_versions_say_what_a_rank_waits_for(case):
    """An entry: its number, its state, other fields. A call without a site is at SITE."""
    if "file" in case:
        dumps = [real(case["file"])]
    else:
        more = {key: case[key] for key in ("status", "config", "version") if key in case}
        dump = case["dump"] if "dump" in case else nccl(*case["entries"], **more)
        dumps = [json.dumps(dump).encode(), *(pickle.dumps(dump, form) for form in range(2, 6))]
    expected = (case["groups"], [[*call, SITE][:4] for call in case["calls"]])
    assert [summary(parse(data)) for data in dumps] == [expected] * len(dumps)


def test_of_many_ranks_none_are_told_and_of_many_calls_the_oldest_of_each_group():
    for count, told in ((512, 512), (513, 0)):
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(count)))}}
        dump = pickle.dumps(nccl([1], config=config), 2)
        assert parse(dump).groups[0].ranks == tuple(range(told))
    ahead = [(number, "scheduled") for number in range(2, 60)]
    other = (5, "scheduled", {"process_group": ("3", "tp"), "pg_id": 1, "record_id": 5000})
    recording = parse(pickle.dumps(nccl([1], *ahead, other), 2))
    assert len(recording.entries) == flight_recorder.MAX_ENTRIES
    assert [call.sequence for call in recording.entries[:3]] == [2, 3, 4]
    assert recording.entries[-1].group == "3"


class _Calls:
    def __reduce__(self):
        return os.system, ("touch /tmp/never",)


HOSTILE = {
    "calls os.system": pickle.dumps({"entries": [_Calls()]}, 2),
    "calls os.system in the newest form": pickle.dumps({"entries": [_Calls()]}, 5),
    "imports": b"\x80\x02cos\nsystem\n.",
    "builds an object": b"\x80\x02)\x81}b.",
    "a persistent id": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "an extension": b"\x80\x02\x82\x01.",
    "deep lists": b"\x80\x02" + b"](" * 20_000 + b".",
    "deep tuples": b"\x80\x02)" + b"\x85" * 20_000 + b".",
    "a huge number": b"\x80\x02\x8b\xff\xff\xff\x7f" + b"\xff" * 1000 + b".",
    "a huge number that is there": b"\x80\x02\x8b\x00\x00\x10\x00" + b"\xff" * (1 << 20) + b".",
    "a number as text": b"L" + b"9" * 100_000 + b"L\n.",
    "a huge text that is not there": b"\x80\x02\x8d" + b"\xff" * 8 + b"a.",
    "a huge memo": b"\x80\x02}r\xff\xff\xff\x7f.",
    "a memo that is not there": b"\x80\x02h\x07.",
    "many marks": b"\x80\x02" + b"(" * 20_000 + b".",
    "items of no dict": b"\x80\x02](K\x01K\x02u.",
    "a mark in the memo": b"\x80\x02(q\x01.",
    "more taken than there is": b"\x80\x02\x87.",
    # A dict of them takes the square of their number.
    "keys of one hash": b"\x80\x02}("
    + b"".join(
        b"\x8a\x0c" + (at * sys.hash_info.modulus).to_bytes(12, "little") + b"N"
        for at in range(30_000)
    )
    + b"u.",
    "nothing": b"",
    "json that is none": b'{"entries": 7}',
    "json, deep": b'{"entries": [' + b"[" * 100_000,
    "json, huge number": b'{"entries": [' + b"9" * 100_000 + b"]}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_dump_calls_nothing_and_takes_little(name, monkeypatch):
    def never(*_):
        raise AssertionError("it was called")

    monkeypatch.setattr(os, "system", never)
    tracemalloc.start()
    began = time.process_time()
    with contextlib.suppress(NoDumpError):
        recording = parse(HOSTILE[name])
        assert (recording.groups, recording.entries) == ((), ())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30 << 20
    assert time.process_time() - began < 2


def test_lists_that_contain_themselves_are_told_in_few_words():
    """Doubled thirty times they would be a text of a billion characters."""
    doubled = [1]
    for _ in range(30):
        doubled = [doubled, doubled]
    around: list = []
    around.append(around)
    for sizes in (doubled, around):
        odd = {"input_sizes": sizes, "frames": sizes, "input_dtypes": sizes}
        (call,) = parse(pickle.dumps(nccl((3, "scheduled", odd)), 2)).entries
        assert len(call.sizes) < 300
    long = {
        "profiling_name": "nccl:" + "x" * 9999,
        "process_group": ("g" * 9999, "d" * 9999),
        "frames": [{"name": "n" * 9999, "filename": "/f" * 9999, "line": 1 << 200}],
    }
    dump = pickle.dumps(nccl((3, "s" * 9999, long), version="v" * 9999), 2)
    assert len(str(parse(dump))) < 3000


@pytest.fixture
def rank():
    process = subprocess.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait()


def put(path, name="late_0", before_s=0.0, called_s=0.0, text=None):
    """The dump, as if it were made now. called_s: since its first call; text: in its place"""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = pickle.loads(real(name))
    for call in plain["entries"]:
        call["time_created_ns"] = int((time.time() - called_s) * 1e9)
    path.write_bytes(pickle.dumps(plain, 2) if text is None else text.encode())
    os.utime(path, (time.time() + 1 - before_s,) * 2)
    return path


def look(pid, environment, number=0):
    return observe(pid, os.getuid(), number, environment)


def dumps_at(prefix, **more):
    return {"TORCH_FR_DUMP_TEMP_FILE": str(prefix), **more}


@pytest.mark.parametrize("case", cases(__file__, "cases/dump_files.json"))
def test_the_dump_of_a_process(tmp_path, case):
    for name, how in case.get("files", {}).items():
        put(tmp_path / name, **how)
    environment = {
        name: value.replace("{at}", str(tmp_path)) for name, value in case["environment"].items()
    }
    with subprocess.Popen(["sleep", "60"], cwd=tmp_path) as process:
        found = look(process.pid, environment, case.get("number", 0))
        process.kill()
    if "path" in case:
        assert (found.absent, found.path) == ("", case["path"].replace("{at}", str(tmp_path)))
        assert len(found.entries) == case.get("entries", 1)
    else:
        assert case["why"].replace("{at}", str(tmp_path)) in found.absent
        assert (found.groups, found.entries) == ((), ())


def test_no_fifo_and_no_endless_link_is_read(rank, tmp_path):
    environment = dumps_at(tmp_path / "fr_", HOME="/nowhere")
    path = tmp_path / "fr_0"
    os.mkfifo(path)
    assert "it is a FIFO" in look(rank, environment).absent
    path.unlink()
    path.symlink_to("fr_0")
    assert "too many levels" in look(rank, environment).absent
    path.unlink()
    other = put(tmp_path / "other")
    path.symlink_to(other)
    assert not look(rank, environment).absent
    # One of gigabytes is read to its bound.
    os.truncate(other, 100 << 30)
    os.utime(other, (time.time() + 1,) * 2)
    assert look(rank, environment).partial
    paths = flight_recorder.dump_paths(os.getuid(), 3, {})
    assert f"{os.path.expanduser('~')}/.cache/torch/comm_lib_trace_rank_3" in paths
    assert "/tmp/nccl_trace_rank_3" in paths


@ROOT_ONLY
def test_no_link_and_no_file_of_another_user_is_read(rank, tmp_path):
    """In /tmp everybody can have given the name away; the message says whose it is."""
    environment = dumps_at(tmp_path / "fr_", HOME="/nowhere")
    path = tmp_path / "fr_0"
    path.symlink_to(put(tmp_path / "other"))
    os.chown(path, 65534, 65534, follow_symlinks=False)
    assert "a link on the way is another user's" in look(rank, environment).absent
    path.unlink()
    os.chown(put(path), 65534, 65534)
    assert "it is another user's file" in look(rank, environment).absent


@ROOT_ONLY
def test_root_reads_a_users_dump_as_that_user(tmp_path):
    """What the user cannot read, root does not read for it either."""
    for above in (tmp_path, *tmp_path.parents):
        above.chmod(above.stat().st_mode | 0o1)
    path = put(tmp_path / "own" / "fr_0")
    for item in (path, path.parent):
        os.chown(item, 65534, 65534)
        item.chmod(0o700)
    secret = tmp_path / "secret"
    secret.mkdir(mode=0o700)
    own, roots = (dumps_at(f"{at}/fr_", HOME="/nowhere") for at in (path.parent, secret))
    user = {"user": 65534, "group": 65534, "extra_groups": []}
    with subprocess.Popen(["sleep", "60"], **user) as process:
        found = observe(process.pid, 65534, 0, own)
        refused = observe(process.pid, 65534, 0, roots)
        process.kill()
    assert (found.absent, found.path) == ("", str(path))
    assert "permission denied" in refused.absent
    assert os.geteuid() == 0


@ROOT_ONLY
def test_the_process_of_another_root_is_asked_there(tmp_path):
    """As in a container: a path, and an absolute link, mean what they mean to the process."""
    root = tmp_path / "root"
    put(root / "data" / "fr_0")
    (root / "link").symlink_to("/data")
    argv = ["python3", "-c", f"import os; os.chroot({str(root)!r}); print(1, flush=True); input()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(argv, **pipes) as process:
        process.stdout.readline()
        for prefix in ("/data/fr_", "/link/fr_", "/../../data/fr_"):
            found = look(process.pid, dumps_at(prefix))
            assert (found.absent, found.path) == ("", f"{prefix}0")
        process.kill()


@pytest.fixture
def pipe(tmp_path):
    """The end of a rank's pipe that its recorder reads, and the rank's environment."""
    path = tmp_path / "pipe_3.pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield reader, {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/pipe_"}
    with contextlib.suppress(OSError):
        os.close(reader)


def test_a_rank_is_asked_by_its_own_pipe(pipe, rank):
    reader, environment = pipe
    assert "does not read it" in ask_for_dump(rank, os.getuid(), 3, environment)
    assert os.read(reader, 9) == b""
    assert ask_for_dump(os.getpid(), os.getuid(), 3, environment) == ""
    assert os.read(reader, 9) == b"1"
    os.close(reader)
    assert "nobody reads it" in ask_for_dump(os.getpid(), os.getuid(), 3, environment)


def test_where_nobody_can_be_asked_nothing_is_made(rank, tmp_path):
    uid, environment = os.getuid(), {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/pipe_"}
    path = tmp_path / "pipe_0.pipe"
    assert "is not set" in ask_for_dump(rank, uid, 0, {})
    assert "is not set" in ask_for_dump(rank, uid, None, environment)
    assert "no such file" in ask_for_dump(rank, uid, 0, environment)
    assert not path.exists()
    path.write_text("")
    assert "no pipe" in ask_for_dump(rank, uid, 0, environment)
    assert path.read_text() == ""
