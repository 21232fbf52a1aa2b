"""NCCL's RAS port: the gate in front of it, and what its reports say, recorded and broken."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeready.node.runtime import Supervisor
from nodeready.node.witnesses import nccl_ras
from nodeready.node.witnesses.nccl_ras import Communicator, Member, Ras
from tests.builders import ras_port
from tests.builders.ras_port import Port, member, missing, report, running

LIMIT_S = 5.0
TWO = [member(0, 0, AllReduce=41), member(1, 4712, AllReduce=40)]


def healthy(*ranks: dict, **how: object) -> str:
    """A report in which the first rank has the stand-in's pid."""
    return report(list(ranks or TWO), **how).replace('"pid": 0,', '"pid": PID,', 1)  # type: ignore[arg-type]


def asked(*ports: Port, allow: bool = False, limit_s: float = LIMIT_S, **how: object) -> Ras:
    environment = {
        "NCCL_RAS_ADDR": f"localhost:{ports[0].port}" if ports else "",
        "WORLD_SIZE": str(how.pop("world", max(1, len(ports)))),
    }
    environment.update(how.pop("environment", {}))  # type: ignore[call-overload]
    uid = os.getuid()
    ranks = [(port.pid, uid, number) for number, port in enumerate(ports)]
    with Supervisor("nodeready:test", 30) as supervisor:
        return nccl_ras.observe(supervisor, ranks, environment, allow, limit_s, **how)  # type: ignore[arg-type]


# --- The gate: the stand-in that must not be asked.


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"version": "2.29.1"}, "before 2.29.2"),
        ({"version": "2.26.5"}, "before 2.29.2"),
        ({"version": "2.3.10"}, "before 2.29.2"),
        ({"version": ""}, "version of the job's NCCL is not known"),
        ({"version": "", "name": "libnccl.so.2.21.5"}, "NCCL 2.21.5"),
        ({"version": "2.27.7", "name": "librccl.so.1"}, "NCCL 2.27.7"),
        ({"name": "libmpi.so.40"}, "no rank here has loaded NCCL"),
        ({"host": "127.0.0.1", "environment": {"NCCL_RAS_ENABLE": "0"}}, "NCCL_RAS_ENABLE=0"),
        ({"initialising": True, "allow": True}, "making a communicator"),
        ({"world": 16}, "also on another node"),
        ({"environment": {"WORLD_SIZE": ""}}, "also on another node"),
        ({"environment": {"NCCL_RAS_ADDR": "gpu001.example.org:28028"}}, "only a numeric address"),
        ({"environment": {"NCCL_RAS_ADDR": "\x1b[2J"}}, "\\x1b"),
        ({"environment": {"NCCL_RAS_ADDR": "localhost:1"}}, "nothing listens at localhost:1"),
    ],
)
def test_the_gate_stays_shut_and_nothing_connects(tmp_path, how, words):
    start = {key: how.pop(key) for key in ("version", "name", "host") if key in how}
    with running(tmp_path / "rank", **start, answer=healthy()) as port:
        said = asked(port, **how)
        assert words in said.absent, said
        assert not port.asked
    assert "\n" not in said.absent
    assert said.communicators == ()


@pytest.mark.parametrize(
    "how",
    [
        {"version": "2.27.3", "allow": True},
        {"version": "", "allow": True},
        {"version": "2.29.7"},
        {"version": "2.30.7", "world": 16, "initialising": False},
        {"version": "2.30.7", "world": 16, "allow": True},
        {"version": "", "name": "libnccl.so.2.30.7"},
        {"environment": {"NCCL_RAS_ENABLE": "1"}},
        {"host": "0.0.0.0"},
        {"host": "::1"},
        {"host": "::"},
    ],
)
def test_the_gate_opens(tmp_path, how):
    start = {key: how.pop(key) for key in ("version", "name", "host") if key in how}
    with running(tmp_path / "rank", **start, answer=healthy()) as port:
        said = asked(port, **how)
    assert (said.absent, said.version) == ("", "2.30.7")
    assert [one.pid for one in said.communicators[0].members] != []


def test_the_version_is_that_of_the_package_where_the_library_does_not_tell(tmp_path):
    site = tmp_path / "site-packages"
    (site / "nvidia_nccl_cu13-2.30.7.dist-info").mkdir(parents=True)
    with running(site / "nvidia/nccl/lib", version="", answer=healthy()) as port:
        assert asked(port).absent == ""


def test_a_library_that_was_replaced_after_the_start_tells_nothing(tmp_path):
    with running(tmp_path, version="2.27.3", answer=healthy()) as port:
        os.rename(ras_port.library(tmp_path, "2.30.7", "new"), tmp_path / "libnccl.so.2")
        said = asked(port)
        assert "not known" in said.absent
        assert not port.asked


def test_another_process_at_the_same_port_is_not_asked(tmp_path):
    """Two jobs of one user: the kernel gives a connection to either (SO_REUSEPORT)."""
    with (
        running(tmp_path / "a", answer=healthy()) as mine,
        running(tmp_path / "b", answer=healthy(), port=mine.port) as other,
    ):
        said = asked(mine)
        assert "not one of this job's listens" in said.absent
        assert not mine.asked
        assert not other.asked
        # Both are ranks of one job.
        assert asked(mine, other).absent == ""


def test_the_answer_of_another_job_is_none(tmp_path):
    with running(tmp_path, answer=report(TWO)) as port:
        assert "another job has answered at 127.0.0.1:" in asked(port).absent


def test_no_rank_is_no_question():
    assert "no rank" in asked().absent


# --- What the port says, and how.


def test_what_the_program_has_set_aside_for_its_threads_is_no_part_of_the_answer(tmp_path):
    with running(tmp_path, answer=healthy()) as port, mmap.mmap(-1, 2 << 30):
        assert asked(port).absent == ""


def test_what_is_said_to_the_port(tmp_path):
    with running(tmp_path, answer=healthy()) as port:
        asked(port)
        assert port.said == ["CLIENT PROTOCOL 2", "TIMEOUT 2", "SET FORMAT json", "VERBOSE STATUS"]


@pytest.mark.parametrize(
    ("manner", "words"),
    [
        ("hangs", "gave no whole answer in time"),
        ("drips", "gave no whole answer in time"),
        ("garbage", "is no RAS port: SSH-2.0-OpenSSH_9.2"),
        ("closes", "broke off: "),
        ("endless", "longer than 32 MiB"),
        ("half", "what makes no sense: {"),
    ],
)
def test_a_port_that_misbehaves(tmp_path, manner, words):
    with running(tmp_path, manner=manner, answer=healthy()) as port:
        said = asked(port, limit_s=2.0)
    assert words in said.absent
    assert "\n" not in said.absent
    assert said.communicators == ()


def test_a_report_of_a_healthy_job(tmp_path):
    ranks = [member(0, 0, AllReduce=41), member(1, 4712, AllReduce=41)]
    with running(tmp_path, answer=healthy(*ranks)) as port:
        (group,) = asked(port).communicators
    assert (group.hash, group.size) == ("0x514e98cf4e44862b", 2)
    assert dict(group.usual)["AllReduce"] == 41
    assert [(one.rank, one.host, one.missing, one.problem) for one in group.members] == [
        (0, "10.0.0.1", "", ""),
        (1, "10.0.0.1", "", ""),
    ]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"init_state": 7}, "in initialisation"),
        ({"init_state": 2}, "initialisation failed: system error"),
        ({"async_error": 6}, "asynchronous error: remote process error"),
        ({"async_error": 7}, ""),
        ({"async_error": 99}, "asynchronous error: 99"),
        ({"abort_flag": True}, "aborted"),
        ({"destroy_flag": True}, "being destroyed"),
        ({"finalize_called": True}, "being destroyed"),
    ],
)
def test_what_the_status_of_a_rank_means(flags, problem):
    said = nccl_ras.read_json(report([member(0, 1, **flags), member(1, 2)]))
    assert said is not None
    assert {one.rank: one.problem for one in said.communicators[0].members}[0] == problem


@pytest.mark.parametrize("comma", [True, False])
def test_missing_ranks_also_without_the_comma_of_some_versions(comma):
    gone = [
        missing(2, 30, unresponsive=True),
        missing(3, 31, unresponsive=True, considered_dead=True),
        missing(4, 32),
    ]
    text = report(TWO, gone, version="2.28.7", timeouts=2, comma=comma)
    said = nccl_ras.read_json(text)
    assert said is not None
    assert (said.version, said.timeouts) == ("2.28.7", 2)
    states = {one.rank: one.missing for one in nccl_ras.bounded(said.communicators)[0].members}
    assert states == {2: "unresponsive", 3: "dead", 4: "missing", 0: "", 1: ""}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        '{"communicators": 3}',
        '{"communicators": [',
        '{"communicators": [], "a": ' + "9" * 9000 + "}",
        '{"communicators": ' + "[" * 90000,
        "\x00\xff",
        "No such thing\n",
    ],
)
def test_what_is_no_report(text):
    assert nccl_ras.read_json(text) is None
    assert nccl_ras.read_text(text) is None


@pytest.mark.parametrize(
    "text",
    [
        '{"communicators": [{}, 3, null, {"ranks": 7, "size": -1, "hash": 8}]}',
        '{"communicators": [{"ranks": [{"pid": -1, "rank": "x", "host": 9, "status": []}]}]}',
        '{"communicators": [{"ranks": [{"collective_counts": {"A": "x", "B": 1e9}}]}], "ras": 1}',
    ],
)
def test_fields_of_a_strange_type_are_unknown(text):
    said = nccl_ras.read_json(text)
    assert said is not None
    for group in said.communicators:
        assert group.size == 0
        assert all(one.pid == 0 and one.rank == -1 for one in group.members)


def test_of_a_large_job_those_that_differ_are_told():
    ranks = [member(number, 1000 + number, AllReduce=90) for number in range(9000)]
    ranks[8123] = member(8123, 9123, AllReduce=89)
    said = nccl_ras.read_json(report(ranks, [missing(9000, 1, considered_dead=True)]))
    assert said is not None
    (group,) = nccl_ras.bounded(said.communicators)
    assert [one.rank for one in group.members[:2]] == [8123, 9000]
    assert len(group.members) < 5000
    assert dict(group.usual)["AllReduce"] == 90


# --- The older report: text that names who differs (NCCL 2.24 to 2.28; rasClientRunComms).

HEAD = """\
NCCL version 2.27.3 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          4            1          8        8

Communicators... (0.01s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
"""
OK = HEAD + "    0         1         2         4         8         8   RUNNING      OK\n"
MISMATCH = (
    HEAD
    + """\
    0         1         2         4         8         8   RUNNING  MISMATCH
    1         2         1         4         4         8   RUNNING      OK

Errors
======

Warnings
========

#0-0 (9723b2ac2b5f5a15) MISMATCH
  Communicator ranks have different AllReduce operation counts
  6 ranks have launched up to operation 41
  2 ranks have launched up to operation 40
  Rank 3 -- GPU 3 managed by process 4714 on node 10.0.0.1
  Rank 5 -- GPU 1 (NVML 5) managed by process 812 on node 10.0.0.2

  Communicator ranks have different AllGather operation counts
  7 ranks have launched up to operation 7
  Rank 5 has not launched any operations -- GPU 1 managed by process 812 on node 10.0.0.2

"""
)
INCOMPLETE = (
    HEAD
    + """\
    0         1         2       3-4         8         7   RUNNING  INCOMPLETE,ERROR,MISMATCH

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 812 on node 10.0.0.2 managing GPU 1

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 813 on node 10.0.0.2 managing GPU 2

#0-0 (9723b2ac2b5f5a15) INCOMPLETE
  Missing communicator data from 2 ranks
  Rank 5 -- GPU 1 managed by process 812 on node 10.0.0.2
  Rank 6 -- GPU 2 managed by process 813 on node 10.0.0.2

#0-0 (9723b2ac2b5f5a15) ERROR
  Asynchronous error on 1 rank
  Rank 0 reported Remote process error -- GPU 0 managed by process 4711 on node 10.0.0.1

Warnings
========

TIMEOUT
  Encountered 3 communication timeouts while gathering communicator data

#0-0 (9723b2ac2b5f5a15) MISMATCH
  Communicator ranks have different status
  5 ranks have status RUNNING
  Rank 1 has status INIT -- GPU 1 managed by process 4712 on node 10.0.0.1
  Rank 2 has status NOCOMM -- GPU 2 managed by process 4713 on node 10.0.0.1
"""
)


def text(words: str) -> Ras:
    said = nccl_ras.read_text(words)
    assert said is not None
    return said


def test_an_old_report_of_a_healthy_job():
    said = text(OK)
    assert (said.version, said.timeouts) == ("2.27.3", 0)
    assert said.communicators == (Communicator("group 0", 8, ()),)


def test_an_old_report_of_ranks_that_are_behind():
    first, second = text(MISMATCH).communicators
    assert (first.hash, first.size) == ("9723b2ac2b5f5a15", 8)
    assert first.usual == (("AllReduce", 41), ("AllGather", 7))
    assert first.members == (
        Member(3, "10.0.0.1", 4714, (("AllReduce", 40),)),
        Member(5, "10.0.0.2", 812, (("AllReduce", 40), ("AllGather", 0))),
    )
    assert (second.size, second.members) == (4, ())


def test_an_old_report_of_ranks_that_are_gone_or_have_failed():
    said = text(INCOMPLETE)
    assert said.timeouts == 3
    (group,) = said.communicators
    found = {one.rank: (one.pid, one.missing or one.problem) for one in group.members}
    assert found == {
        0: (4711, "error: remote process error"),
        1: (4712, "in initialisation"),
        2: (4713, "missing"),
        5: (812, "unresponsive"),
        6: (813, "dead"),
    }


def test_an_old_port_is_asked_for_text(tmp_path):
    with running(tmp_path, version="2.27.3", manner="old", answer=MISMATCH) as port:
        said = asked(port, allow=True)
    assert (said.absent, said.version) == ("", "2.27.3")
    assert len(said.communicators) == 2


@pytest.mark.parametrize("cut", range(0, len(INCOMPLETE), 97))
def test_a_text_that_is_cut_off_anywhere_raises_nothing(cut):
    nccl_ras.read_text(INCOMPLETE[:cut])
    nccl_ras.read_text(INCOMPLETE[cut:])


# --- Listeners as /proc shows them.


def test_listeners_of_both_families():
    tcp = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:6D7C 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 77 1
   1: 0100007F:6D7C 0100007F:C350 01 00000000:00000000 00:00000000 00000000  1000        0 78 1
   2: bad
"""
    tcp6 = """\
  sl  local_address                         remote_address             st ...
  0: 00000000000000000000000001000000:6D7C 00000000000000000000000000000000:0000 0A 0:0 0:0 0 5 0 9
"""
    (one,) = nccl_ras.listeners(tcp)
    assert (one.address, one.port, one.uid, one.inode) == ("127.0.0.1", 28028, 1000, 77)
    (six,) = nccl_ras.listeners(tcp6)
    assert (six.address, six.port, six.uid, six.inode) == ("::1", 28028, 5, 9)


@pytest.mark.parametrize(
    ("frames", "may"),
    [
        (
            [
                ("main", "train.py"),
                ("init_process_group", "torch/distributed/distributed_c10d.py"),
            ],
            True,
        ),
        ([("main", "train.py"), ("new_group", "torch/distributed/distributed_c10d.py")], True),
        ([("wrapper", "x.py"), ("all_reduce", "torch/distributed/distributed_c10d.py")], True),
        ([("all_gather_into_tensor", "torch/distributed/distributed_c10d.py")], True),
        ([("main", "train.py"), ("synchronize", "torch/cuda/__init__.py")], False),
        ([("main", "train.py"), ("step", "train.py")], False),
        ([("all_reduce", "mylib.py")], False),
        ([], False),
    ],
)
def test_who_may_be_making_a_communicator(frames, may):
    assert nccl_ras.makes_communicator(frames) is may


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that every user can reach."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        os.chmod(made, 0o755)
        yield Path(made)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(
    ("mode", "absent"), [(0o644, ""), (0o600, "the version of the job's NCCL is not known")]
)
def test_as_root_it_is_asked_with_the_users_rights_alone(shared, mode, absent):
    """A library that its user may not read is not read by root either."""
    with running(shared / "rank", answer=healthy(), uid=65534) as port:
        os.chmod(shared / "rank/libnccl.so.2", mode)
        environment = {"NCCL_RAS_ADDR": f"localhost:{port.port}", "WORLD_SIZE": "1"}
        with Supervisor("nodeready:test", 30) as supervisor:
            said = nccl_ras.observe(supervisor, [(port.pid, 65534, 0)], environment, False, 5.0)
        assert said.absent.startswith(absent)
        assert bool(said.absent) == bool(absent)
        assert port.asked is not bool(absent)


def test_a_process_that_is_anothers_by_now_is_not_asked(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    with running(tmp_path, answer=healthy()) as port:
        with Supervisor("nodeready:test", 30) as supervisor:
            environment = {"NCCL_RAS_ADDR": f"localhost:{port.port}", "WORLD_SIZE": "1"}
            said = nccl_ras.observe(supervisor, [(port.pid, 65534, 0)], environment, False, 5.0)
        assert "another user's rights" in said.absent
        assert not port.asked


# --- Who is who in the whole job.


def group(size: int, *members: tuple[int, str, int]) -> Communicator:
    return Communicator("0x1", size, tuple(Member(*one) for one in members))


FIRST = ((0, "10.0.0.1", 70), (1, "10.0.0.1", 71))
OTHERS = ((2, "10.0.0.2", 70), (3, "10.0.0.2", 75))
OWN = {70: 0, 71: 1}


@pytest.mark.parametrize(
    ("groups", "own", "world", "ranks"),
    [
        # The communicator of all tells who is who in that of two, where the numbers are others.
        (
            [group(4, *FIRST, *OTHERS), group(2, (0, "10.0.0.2", 75), (1, "10.0.0.1", 71))],
            OWN, 4, [[0, 1, 2, 3], [3, 1]],
        ),
        # Without one of all, those of this node alone.
        ([group(2, (0, "10.0.0.2", 75), (1, "10.0.0.1", 71))], OWN, 4, [[-1, 1]]),
        # A rank that has died since is in it, too.
        ([group(4, *FIRST, *OTHERS)], {71: 1}, 4, [[0, 1, 2, 3]]),
        # In another order than the job's, nobody else is known.
        ([group(4, *FIRST, *OTHERS)], {70: 3, 71: 2}, 4, [[3, 2, -1, -1]]),
        ([group(4, *FIRST, *OTHERS)], OWN, None, [[0, 1, -1, -1]]),
        # Two nodes with the same pids (containers): this one is not known by them.
        (
            [group(4, *FIRST, (2, "10.0.0.2", 70), (3, "10.0.0.2", 71))],
            OWN, 4, [[0, 1, 2, 3]],
        ),
        ([group(2, (0, "10.0.0.2", 70), (1, "10.0.0.1", 70))], OWN, 4, [[-1, -1]]),
        ([group(2, (0, "", 0), (1, "10.0.0.1", 71))], OWN, 2, [[-1, 1]]),
    ],
)  # fmt: skip
def test_who_is_who_in_the_job(groups, own, world, ranks):
    found = nccl_ras.joined(groups, own, world)
    assert [[one.world_rank for one in each.members] for each in found] == ranks


def test_the_members_of_a_report_have_their_ranks(tmp_path):
    with running(tmp_path, answer=healthy(member(0, 0), member(1, 4712, "10.0.0.2"))) as port:
        said = asked(port, world=2, initialising=False)
    assert [one.world_rank for one in said.communicators[0].members] == [0, 1]


def test_of_a_job_too_large_to_be_told_its_own_process_is_known(tmp_path):
    """It is looked for before the members are bounded."""
    ranks = [member(number, 1000 + number, "10.0.0.2", AllReduce=9) for number in range(9000)]
    odd = [missing(9000 + number, 20000 + number) for number in range(4200)]
    text = report([*ranks, member(13200, 1234567)], odd).replace("1234567", "PID")
    with running(tmp_path, answer=text) as port:
        assert asked(port, world=13201, initialising=False).absent == ""
