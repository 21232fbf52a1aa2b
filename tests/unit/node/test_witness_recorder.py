"""What PyTorch's flight recorder wrote: real dumps, those of other versions, and hostile ones."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import subprocess
import time
import tracemalloc
from pathlib import Path

import pytest

from nodeready.node.witnesses import flight_recorder
from nodeready.node.witnesses.flight_recorder import NoDumpError, ask_for_dump, observe, parse

#: Written by four ranks of torch 2.15 with gloo; make.py tells how.
DATA = Path(__file__).parent / "data" / "flight_recorder"


def real(name):
    return (DATA / name).read_bytes()


def told(recording):
    """(group, enqueued, completed), and (group, sequence, operation, site)."""
    groups = [(one.desc, one.enqueued, one.completed) for one in recording.groups]
    calls = [(one.group, one.sequence, one.operation, one.site) for one in recording.entries]
    return groups, calls


# --- Real dumps.


@pytest.mark.parametrize(
    ("name", "groups", "calls"),
    [
        ("late_0", [("default_pg", 4, 3)], [("0", 4, "all_reduce", "train.py:10 step")]),
        # The rank that has not called the fourth.
        ("late_3", [("default_pg", 3, 3)], []),
        ("late.json_0", [("default_pg", 4, 3)], [("0", 4, "all_reduce", "")]),
        ("late.json_3", [("default_pg", 3, 3)], []),
        (
            "group_0",
            [("default_pg", 3, 3), ("tp", 1, 0)],
            [("1", 1, "all_reduce", "train.py:31 main")],
        ),
        ("group_1", [("default_pg", 4, 3)], [("0", 4, "all_reduce", "train.py:10 step")]),
        ("types_2", [("default_pg", 4, 3)], [("0", 4, "broadcast", "train.py:37 main")]),
    ],
)
def test_a_dump_of_a_rank_says_what_it_waits_for(name, groups, calls):
    found = parse(real(name))
    assert (found.version, found.partial) == ("2.10", False)
    assert told(found) == (groups, calls)


def test_sizes_and_types_are_the_inputs_and_the_outputs():
    (entry,) = parse(real("types_2")).entries
    assert (entry.sizes, entry.types) == ("[[16], [16]]", "[Double, Double]")
    assert (entry.state, entry.is_p2p) == ("scheduled", False)


def test_ranks_of_gloo_are_not_told_as_they_may_be_another_groups():
    """Its only configuration has no name: in this dump it is the second group's."""
    plain = pickle.loads(real("group_1"))
    assert plain["pg_config"][""]["ranks"] == "[0, 1]"
    assert parse(real("group_1")).groups[0].ranks == ()


def test_a_dump_without_entries_tells_how_far_the_groups_are():
    found = parse(real("late.status_0"))
    assert found.partial
    assert [(one.name, one.enqueued, one.completed) for one in found.groups] == [("0", 4, 3)]


@pytest.mark.parametrize("name", ["late_0", "group_0", "late.json_0"])
def test_of_a_dump_that_was_cut_off_nothing_wrong_is_told(name):
    """At each byte: what is told of it is told of the whole one, too."""
    data = real(name)
    whole = parse(data)
    for size in range(len(data)):
        try:
            found = parse(data[:size])
        except NoDumpError:
            continue
        assert found.partial
        assert set(found.entries) <= set(whole.entries), size
        for group in found.groups:
            of = next(one for one in whole.groups if one.name == group.name)
            assert group.enqueued in (None, of.enqueued)
            assert group.completed is None or group.completed <= of.completed


# --- The forms of other versions.


def entry(sequence, state="completed", **more):
    """An entry of ProcessGroupNCCL's, version 2.4 and newer."""
    return {
        "frames": [
            {"name": "wrapper", "filename": "/v/site-packages/torch/x.py", "line": 83},
            {"name": "step", "filename": "/home/u/train.py", "line": 88},
            {"name": "main", "filename": "/home/u/train.py", "line": 120},
        ],
        "record_id": sequence,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[1024]],
        "input_dtypes": ["Float"],
        "output_sizes": [[1024]],
        "output_dtypes": ["Float"],
        "state": state,
        "retired": state == "completed",
        "timeout_ms": 600000,
        "is_p2p": False,
        **more,
    }


def nccl(*entries, status=None, config=None, **more):
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}, **(config or {})}
    found = {"version": "2.10", "pg_config": config, "entries": list(entries), **more}
    if status is not None:
        names = (
            "last_enqueued_collective",
            "last_started_collective",
            "last_completed_collective",
        )
        found["pg_status"] = {
            id_: dict(zip(names, row, strict=True)) for id_, row in status.items()
        }
    return found


SITE = "train.py:88 step"
FORMS = {
    "2.10, a collective that runs": (
        nccl(entry(1), entry(2), entry(3, "started"), status={"0": (3, 3, 2)}),
        [("default_pg", 3, 2)],
        [("0", 3, "all_reduce", SITE)],
    ),
    # The watchdog has given up: retired, and never completed.
    "2.10, after the timeout": (
        nccl(entry(2), entry(3, "started", retired=True), entry(4, "scheduled")),
        [("default_pg", 4, 2)],
        [("0", 3, "all_reduce", SITE), ("0", 4, "all_reduce", SITE)],
    ),
    "2.10, nothing has been called": (
        nccl(status={"0": (-1, -1, -1)}),
        [("default_pg", 0, 0)],
        [],
    ),
    "2.10, an earlier one than the last completed still runs": (
        nccl(entry(1, "started"), entry(2), status={"0": (2, 2, 2)}),
        [("default_pg", 2, 2)],
        [("0", 1, "all_reduce", SITE)],
    ),
    "2.4, sends and receives": (
        nccl(
            entry(3),
            entry(
                *(3, "started"),
                is_p2p=True,
                p2p_seq_id=7,
                profiling_name="nccl:send 1->2",
                process_group=("5", "pp"),
                pg_id=2,
            ),
            version="2.4",
        ),
        [("default_pg", 3, 3), ("pp", None, None)],
        [("5", 7, "send 1->2", SITE)],
    ),
    # ProcessGroupNCCL::endCoalescing: what is launched together has one number, and no state.
    "2.10, batch_isend_irecv, one that is done and one that is not": (
        nccl(
            *(
                entry(
                    *(0, state),
                    is_p2p=True,
                    p2p_seq_id=number,
                    profiling_name=f"nccl:{name}",
                    process_group=("5", "pp"),
                    pg_id=2,
                )
                for number, last in ((7, "completed"), (8, "started"))
                for name, state in (
                    ("send 1->2", "scheduled"),
                    ("recv 1<-0", "scheduled"),
                    ("coalesced", last),
                )
            ),
            status={"2": (8, 8, 7)},
        ),
        [("default_pg", None, None), ("pp", 8, 7)],
        [
            ("5", 8, "send 1->2", SITE),
            ("5", 8, "recv 1<-0", SITE),
            ("5", 8, "coalesced", SITE),
        ],
    ),
    "2.10, FSDP's collectives that are launched together": (
        nccl(
            entry(4, "scheduled", profiling_name="nccl:_all_gather_base"),
            entry(4, "scheduled", profiling_name="nccl:_all_gather_base"),
            entry(4, profiling_name="nccl:coalesced"),
            status={"0": (4, 4, 4)},
        ),
        [("default_pg", 4, 4)],
        [],
    ),
    "two groups, one of which never called": (
        nccl(
            entry(9),
            status={"0": (9, 9, 9)},
            config={"3": {"name": "3", "desc": "tp", "ranks": [0, 1]}},
        ),
        [("default_pg", 9, 9), ("tp", None, None)],
        [],
    ),
    "1.5, of torch 2.3: one number, no groups' status": (
        {
            "version": "1.5",
            "entries": [
                {
                    "seq_id": number,
                    "pg_id": 0,
                    "profiling_name": "nccl:broadcast",
                    "state": state,
                    "frames": [],
                    "input_sizes": [[3, 4]],
                    "output_sizes": [[3, 4]],
                    "retired": state == "completed",
                }
                for number, state in ((7, "completed"), (8, "scheduled"))
            ],
        },
        [("", 8, 7)],
        [("0", 8, "broadcast", "")],
    ),
    "torch 2.2: a list": (
        [
            {"seq_id": 1, "pg_id": 0, "profiling_name": "nccl:all_reduce", "state": "completed"},
            {"seq_id": 2, "pg_id": 0, "profiling_name": "nccl:all_reduce", "state": "started"},
        ],
        [("", 2, 1)],
        [("0", 2, "all_reduce", "")],
    ),
    # c10d/hooks/FlightRecorderHook.hpp: without a completion hook, an entry is retired at issue.
    "2.10, a hooked backend": (
        nccl(
            entry(1, "scheduled", retired=True, profiling_name="mine:all_reduce"),
            entry(2, "scheduled", retired=True, profiling_name="mine:all_reduce"),
        ),
        [("default_pg", 2, 2)],
        [],
    ),
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", FORMS)
def test_dumps_of_all_versions_are_read(name, protocol):
    dump, groups, calls = FORMS[name]
    assert told(parse(pickle.dumps(dump, protocol))) == (groups, calls)


@pytest.mark.parametrize("name", FORMS)
def test_dumps_in_json_are_read(name):
    dump, groups, calls = FORMS[name]
    assert told(parse(json.dumps(dump).encode())) == (groups, calls)


def test_ranks_of_a_group_are_told_unless_they_are_too_many():
    assert parse(pickle.dumps(nccl(entry(1)), 2)).groups[0].ranks == (0, 1, 2, 3)
    many = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(100_000)))}}
    assert parse(pickle.dumps(nccl(entry(1), config=many), 2)).groups[0].ranks == ()


def test_of_many_calls_the_oldest_of_each_group_are_told():
    ahead = [entry(n, "scheduled") for n in range(2, 2000)]
    other = entry(5, "scheduled", process_group=("3", "tp"), pg_id=1, record_id=5000)
    found = parse(pickle.dumps(nccl(entry(1), *ahead, other), 2))
    assert len(found.entries) == flight_recorder.MOST_ENTRIES
    assert [one.sequence for one in found.entries[:3]] == [2, 3, 4]
    assert found.entries[-1].group == "3"


# --- Hostile ones.


class _Calls:
    def __reduce__(self):
        return os.system, ("touch /tmp/never",)


def _nested(opener, count):
    return b"\x80\x02" + opener * count + b"."


HOSTILE = {
    "calls os.system": pickle.dumps({"entries": [_Calls()]}, 2),
    "calls os.system in the newest form": pickle.dumps({"entries": [_Calls()]}, 5),
    "imports": b"\x80\x02cos\nsystem\n.",
    "builds an object": b"\x80\x02)\x81}b.",
    "a persistent id": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "an extension": b"\x80\x02\x82\x01.",
    "deep lists": b"\x80\x02" + b"](" * 300_000 + b".",
    "deep tuples": b"\x80\x02)" + b"\x85" * 1_000_000 + b".",
    "a huge number": b"\x80\x02\x8b\xff\xff\xff\x7f" + b"\xff" * 1000 + b".",
    "a huge number that is there": b"\x80\x02\x8b\x00\x00\x10\x00" + b"\xff" * (1 << 20) + b".",
    "a number as text": b"L" + b"9" * 1_000_000 + b"L\n.",
    "a huge text that is not there": b"\x80\x02\x8d" + b"\xff" * 8 + b"a.",
    "a huge memo": b"\x80\x02}r\xff\xff\xff\x7f.",
    "a memo that is not there": b"\x80\x02h\x07.",
    "many marks": b"\x80\x02" + b"(" * 1_000_000 + b".",
    "items of no dict": b"\x80\x02](K\x01K\x02u.",
    "a mark in the memo": b"\x80\x02(q\x01.",
    "more taken than there is": b"\x80\x02\x87.",
    "nothing": b"",
    "text": b"no dump at all\n",
    "json that is none": b'{"entries": 7}',
    "json, deep": b'{"entries": [' + b"[" * 100_000,
    "json, huge number": b'{"entries": [' + b"9" * 100_000 + b"]}",
    "zeros": bytes(1 << 20),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_dump_calls_nothing_and_takes_little(name, monkeypatch):
    def never(*_):
        raise AssertionError("it was called")

    monkeypatch.setattr(os, "system", never)
    tracemalloc.start()
    with contextlib.suppress(NoDumpError):
        found = parse(HOSTILE[name])
        assert (found.groups, found.entries) == ((), ())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 300 << 20


def test_lists_that_contain_themselves_are_told_in_few_words():
    """Doubled thirty times they would be a text of a billion characters."""
    doubled = [1]
    for _ in range(30):
        doubled = [doubled, doubled]
    around: list = []
    around.append(around)
    for sizes in (doubled, around):
        dump = nccl(entry(3, "scheduled", input_sizes=sizes, frames=sizes, input_dtypes=sizes))
        (found,) = parse(pickle.dumps(dump, 2)).entries
        assert len(found.sizes) < 300


def test_long_words_of_a_dump_are_cut():
    dump = nccl(
        entry(
            *(3, "s" * 9999),
            profiling_name="nccl:" + "x" * 9999,
            process_group=("g" * 9999, "d" * 9999),
            frames=[{"name": "n" * 9999, "filename": "/f" * 9999, "line": 1 << 200}],
        ),
        version="v" * 9999,
    )
    found = parse(pickle.dumps(dump, 2))
    assert len(str(found)) < 3000


def test_the_reader_agrees_with_pythons_own():
    for path in sorted(DATA.glob("*_?")):
        if "json" not in path.name:
            data = path.read_bytes()
            assert flight_recorder.unpickled(data) == (pickle.load(io.BytesIO(data)), False)


# --- The file.


@pytest.fixture
def rank():
    """A process that stands for a rank."""
    process = subprocess.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait()


def put(path, name="late_0", before_s=0.0, called_s=0.0):
    """The dump, as if it were made now. called_s: since its first call"""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = pickle.loads(real(name))
    for call in plain["entries"]:
        call["time_created_ns"] = int((time.time() - called_s) * 1e9)
    path.write_bytes(pickle.dumps(plain, 2))
    moment = time.time() + 1 - before_s
    os.utime(path, (moment, moment))
    return path


def look(pid, environment, number=0):
    return observe(pid, os.getuid(), number, environment)


def test_the_dump_is_where_the_environment_says(rank, tmp_path):
    path = put(tmp_path / "dumps" / "fr_0")
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        found = look(rank, {name: f"{tmp_path}/dumps/fr_"})
        assert (found.absent, found.path) == ("", str(path))
        assert len(found.entries) == 1


@pytest.mark.parametrize(
    ("environment", "where"),
    [
        ({"HOME": "{at}"}, ".cache/torch/comm_lib_trace_rank_0"),
        ({"HOME": "{at}"}, ".cache/torch/nccl_trace_rank_0"),
        ({"HOME": "/nowhere", "XDG_CACHE_HOME": "{at}/c"}, "c/torch/comm_lib_trace_rank_0"),
    ],
)
def test_the_dump_is_where_each_version_puts_it(rank, tmp_path, environment, where):
    path = put(tmp_path / where)
    found = look(rank, {key: value.format(at=tmp_path) for key, value in environment.items()})
    assert found.path == str(path)


def test_without_a_home_the_users_is_meant():
    paths = flight_recorder.places(os.getuid(), 3, {})
    assert f"{os.path.expanduser('~')}/.cache/torch/comm_lib_trace_rank_3" in paths
    assert "/tmp/nccl_trace_rank_3" in paths


def test_the_newest_dump_counts(rank, tmp_path):
    put(tmp_path / ".cache/torch/comm_lib_trace_rank_0", "late_0")
    new = put(tmp_path / "new_0", "late_3", before_s=-5)
    found = look(rank, {"HOME": str(tmp_path), "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/new_"})
    assert (found.path, found.entries) == (str(new), ())


def test_a_dump_of_an_earlier_run_is_none(rank, tmp_path):
    put(tmp_path / "fr_0", before_s=3600)
    found = look(rank, {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/fr_"})
    assert "older than the process" in found.absent
    assert (found.groups, found.entries) == ((), ())


def test_a_dump_of_another_job_is_none(rank, tmp_path):
    """Two jobs of one user have the same ranks, and write to the same place."""
    put(tmp_path / "fr_0", called_s=3600)
    found = look(rank, {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/fr_"})
    assert "it is another process's" in found.absent
    assert (found.groups, found.entries) == ((), ())


def test_where_the_newest_is_no_dump_the_next_one_counts(rank, tmp_path):
    path = put(tmp_path / ".cache/torch/comm_lib_trace_rank_0")
    broken = tmp_path / "fr_0"
    environment = {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/fr_", "HOME": str(tmp_path)}
    for data in (b"", b"none at all"):
        broken.write_bytes(data)
        os.utime(broken, (time.time() + 9,) * 2)
        assert look(rank, environment).path == str(path)
    path.unlink()
    assert look(rank, environment).absent.startswith(f"{broken}: it is no dump")


def test_a_relative_name_is_one_in_the_processes_directory(tmp_path):
    put(tmp_path / "fr_0")
    process = subprocess.Popen(["sleep", "60"], cwd=tmp_path)
    try:
        assert not look(process.pid, {"TORCH_FR_DUMP_TEMP_FILE": "fr_"}).absent
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("environment", "number", "why"),
    [
        ({"HOME": "/nowhere"}, 0, "no dump has been written"),
        ({"HOME": "/nowhere"}, None, "its rank is not known"),
        ({"TORCH_FR_BUFFER_SIZE": "0"}, 0, "its recorder is off"),
        (
            {"TORCH_FR_DUMP_TEMP_FILE": "/proc/self/fd/", "HOME": "/nowhere"},
            0,
            "/proc/self/fd/0: ",
        ),
        ({"TORCH_FR_DUMP_TEMP_FILE": "\0"}, 0, "no dump has been written"),
    ],
)
def test_where_there_is_no_dump_it_is_told_why(rank, environment, number, why):
    assert why in look(rank, environment, number).absent


def test_no_link_of_anybody_else_no_fifo_and_no_other_users_file_is_read(rank, tmp_path):
    """In /tmp everybody can have given the name away; what is there says whose it is."""
    environment = {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/fr_", "HOME": "/nowhere"}
    path = tmp_path / "fr_0"
    os.mkfifo(path)
    assert "it is a FIFO" in look(rank, environment).absent
    path.unlink()
    path.symlink_to("fr_0")
    assert "too many levels" in look(rank, environment).absent
    path.unlink()
    target = put(tmp_path / "other")
    path.symlink_to(target)
    assert not look(rank, environment).absent
    if os.getuid():
        pytest.skip("only root can make another user's files")
    os.chown(path, 65534, 65534, follow_symlinks=False)
    assert "a link on the way is another user's" in look(rank, environment).absent
    path.unlink()
    put(path)
    os.chown(path, 65534, 65534)
    assert "it is another user's file" in look(rank, environment).absent


def test_root_reads_a_users_dump_as_that_user(tmp_path):
    """What the user cannot read, root does not read for it either."""
    if os.getuid():
        pytest.skip("only root looks at others")
    for above in (tmp_path, *tmp_path.parents):
        above.chmod(above.stat().st_mode | 0o1)
    path = put(tmp_path / "own" / "fr_0")
    for one in (path, path.parent):
        os.chown(one, 65534, 65534)
        one.chmod(0o700)
    secret = tmp_path / "secret"
    secret.mkdir(mode=0o700)
    process = subprocess.Popen(["sleep", "60"], user=65534, group=65534, extra_groups=[])
    try:
        for prefix, why in ((path.parent, ""), (secret, "permission denied")):
            environment = {"TORCH_FR_DUMP_TEMP_FILE": f"{prefix}/fr_", "HOME": "/nowhere"}
            assert why in observe(process.pid, 65534, 0, environment).absent
        assert observe(
            process.pid, 65534, 0, {"TORCH_FR_DUMP_TEMP_FILE": f"{path.parent}/fr_"}
        ).path
        assert os.geteuid() == 0
    finally:
        process.kill()
        process.wait()


def test_a_dump_of_gigabytes_is_read_to_its_bound(rank, tmp_path):
    path = put(tmp_path / "fr_0")
    with path.open("r+b") as file:
        file.truncate(100 << 30)
    os.utime(path, (time.time() + 1,) * 2)
    assert look(rank, {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/fr_"}).partial


def test_the_process_of_another_root_is_asked_there(tmp_path):
    """As in a container: a path, and an absolute link, mean what they mean to the process."""
    if os.getuid():
        pytest.skip("only root can change a process's root")
    put(tmp_path / "root" / "data" / "fr_0")
    (tmp_path / "root" / "link").symlink_to("/data")
    code = (
        f"import os,time; os.chroot({str(tmp_path / 'root')!r}); "
        "print(1, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(["python3", "-c", code], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        for prefix in ("/data/fr_", "/link/fr_", "/../../data/fr_"):
            found = look(process.pid, {"TORCH_FR_DUMP_TEMP_FILE": prefix})
            assert (found.absent, found.path) == ("", f"{prefix}0")
    finally:
        process.kill()
        process.wait()


# --- Asking for one.


def test_a_rank_is_asked_by_its_own_pipe(tmp_path):
    path = tmp_path / "pipe_3.pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    environment = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/pipe_"}
    assert ask_for_dump(os.getpid(), os.getuid(), 3, environment) == ""
    assert os.read(reader, 9) == b"1"
    os.close(reader)
    assert "nobody reads it" in ask_for_dump(os.getpid(), os.getuid(), 3, environment)


def test_a_pipe_that_the_rank_does_not_read_is_not_written(rank, tmp_path):
    path = tmp_path / "pipe_3.pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    environment = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/pipe_"}
    assert "does not read it" in ask_for_dump(rank, os.getuid(), 3, environment)
    assert os.read(reader, 9) == b""
    os.close(reader)


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
