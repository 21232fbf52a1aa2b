"""NCCL's RAS port: the gate in front of it, and what its reports say, recorded and broken."""

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from nodeready.agent import proc
from nodeready.agent.runtime import ProcessSupervisor
from nodeready.agent.witnesses import nccl_ras
from nodeready.agent.witnesses.nccl_ras import Communicator, Member, Ras
from tests.builders import ras_port
from tests.builders.ras_port import Port, member, missing, report, running
from tests.cases import cases, with_table

TWO = [member(0, 0, AllReduce=41), member(1, 4712, AllReduce=40)]
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def healthy(*ranks: dict) -> str:
    """A report in which the first rank has the stand-in's pid."""
    return report(list(ranks or TWO)).replace('"pid": 0,', '"pid": PID,', 1)


def asked(*ports: Port, allow: bool = False, limit_s: float = 5.0, uid=None, **how: object) -> Ras:
    environment = {
        "NCCL_RAS_ADDR": f"localhost:{ports[0].port}" if ports else "",
        "WORLD_SIZE": str(how.pop("world", max(1, len(ports)))),
        **how.pop("environment", {}),
    }
    uid = os.getuid() if uid is None else uid
    ranks = [(port.pid, uid, number) for number, port in enumerate(ports)]
    with ProcessSupervisor("nodeready:test", 30) as supervisor:
        return nccl_ras.observe(supervisor, ranks, environment, allow, limit_s, **how)


@contextmanager
def listening(directory: Path, case: dict) -> Iterator[Port]:
    names = {"version": "version", "library": "name", "host": "host"}
    how = {names[key]: case[key] for key in names if key in case}
    with running(directory / "rank", **how, answer=healthy()) as port:
        yield port


@pytest.mark.parametrize("case", cases(__file__, "cases/nccl_ras.json", "shut"))
def test_the_gate_stays_shut_and_nothing_connects(tmp_path, case):
    with listening(tmp_path, case) as port:
        ras = asked(port, environment=case.get("environment", {}), **case.get("ask", {}))
        assert case["why"] in ras.absent, ras
        assert not port.asked
    assert "\n" not in ras.absent
    assert ras.communicators == ()


@pytest.mark.parametrize("case", cases(__file__, "cases/nccl_ras.json", "open"))
def test_the_gate_opens(tmp_path, case):
    with listening(tmp_path, case) as port:
        ras = asked(port, environment=case.get("environment", {}), **case.get("ask", {}))
    assert (ras.absent, ras.version) == ("", "2.30.7")
    assert ras.communicators[0].members


def test_a_library_that_was_replaced_or_an_answer_of_another_job_tells_nothing(tmp_path):
    with running(tmp_path / "a", answer=report(TWO)) as port:
        assert "another job has answered at 127.0.0.1:" in asked(port).absent
    with running(tmp_path / "b", version="2.27.3", answer=healthy()) as port:
        new = ras_port.library(tmp_path / "b", "2.30.7", "new")
        os.rename(new, tmp_path / "b/libnccl.so.2")
        assert "not known" in asked(port).absent
        assert not port.asked
    assert "no rank" in asked().absent
    # Where the library does not tell, the version is that of its package.
    site = tmp_path / "site-packages"
    (site / "nvidia_nccl_cu13-2.30.7.dist-info").mkdir(parents=True)
    with running(site / "nvidia/nccl/lib", version="", answer=healthy()) as port:
        assert asked(port).absent == ""


def test_another_process_at_the_same_port_is_not_asked(tmp_path):
    """Two jobs of one user: the kernel gives a connection to either (SO_REUSEPORT)."""
    with (
        running(tmp_path / "a", answer=healthy()) as mine,
        running(tmp_path / "b", answer=healthy(), port=mine.port) as other,
    ):
        assert "not one of this job's listens" in asked(mine).absent
        assert not mine.asked
        assert not other.asked
        # Both are ranks of one job.
        assert asked(mine, other).absent == ""


@pytest.mark.parametrize("case", cases(__file__, "cases/nccl_ras.json", "frames"))
def test_who_may_be_making_a_communicator(case):
    assert nccl_ras.makes_communicator(case["frames"]) is case["may"]


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that every user can reach."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        os.chmod(path, 0o755)
        yield Path(path)


@ROOT_ONLY
@with_table("mode, uid, absent")
def test_as_root_it_is_asked_with_the_users_rights_alone(shared, mode, uid, absent):
    with running(shared / "rank", answer=healthy(), uid=uid) as port:
        os.chmod(shared / "rank/libnccl.so.2", mode)
        ras = asked(port, uid=65534)
        assert absent in ras.absent
        assert bool(ras.absent) == bool(absent) != port.asked


def test_a_report_of_a_healthy_job(tmp_path):
    ranks = [member(0, 0, AllReduce=41), member(1, 4712, "10.0.0.2", AllReduce=41)]
    # What the program has set aside for its threads is no part of the answer.
    with running(tmp_path, answer=healthy(*ranks)) as port, mmap.mmap(-1, 2 << 30):
        (group,) = asked(port, world=2, allow=True).communicators
        assert port.said == ["CLIENT PROTOCOL 2", "TIMEOUT 2", "SET FORMAT json", "VERBOSE STATUS"]
    assert (group.hash, group.size) == ("0x514e98cf4e44862b", 2)
    assert dict(group.usual)["AllReduce"] == 41
    first, second = (replace(one, counts=()) for one in group.members)
    assert first == Member(0, "10.0.0.1", port.pid, (), world_rank=0)
    assert second == Member(1, "10.0.0.2", 4712, (), world_rank=1)


@with_table("manner, words")
def test_a_port_that_misbehaves(tmp_path, monkeypatch, manner, words):
    monkeypatch.setattr(nccl_ras, "_MAX_BYTES", 1 << 20)
    with running(tmp_path, manner=manner, answer=healthy()) as port:
        ras = asked(port, limit_s=0.7 if manner in ("hangs", "drips") else 5.0)
    assert words in ras.absent
    assert "\n" not in ras.absent
    assert ras.communicators == ()


def parsed(text: str) -> Ras:
    ras = nccl_ras.read_json(text) or nccl_ras.read_text(text)
    assert ras is not None
    return ras


@pytest.mark.parametrize("case", cases(__file__, "cases/nccl_ras.json", "status"))
def test_the_status_of_a_rank(case):
    (group,) = parsed(report([member(0, 1, **case["flags"]), member(1, 2)])).communicators
    assert {one.rank: one.problem for one in group.members}[0] == case["problem"]


@pytest.mark.parametrize("comma", [True, False])
def test_missing_ranks_also_without_the_comma_of_some_versions(comma):
    gone = [missing(2, 30, unresponsive=True), missing(4, 32)]
    gone.append(missing(3, 31, unresponsive=True, considered_dead=True))
    ras = parsed(report(TWO, gone, version="2.28.7", timeouts=2, comma=comma))
    assert (ras.version, ras.timeouts) == ("2.28.7", 2)
    states = {
        one.rank: one.missing for one in nccl_ras.within_limits(ras.communicators)[0].members
    }
    assert states == {2: "unresponsive", 3: "dead", 4: "missing", 0: "", 1: ""}


NO_REPORTS = (
    *("", "{}", "[]", "null", "\x00\xff", "No such thing\n", '{"communicators": 3}'),
    '{"communicators": [',
    '{"communicators": [], "a": ' + "9" * 9000 + "}",
    '{"communicators": ' + "[" * 90000,
)


@pytest.mark.parametrize("text", NO_REPORTS, ids=lambda text: text[:20])
def test_what_is_no_report(text):
    assert nccl_ras.read_json(text) is None
    assert nccl_ras.read_text(text) is None


def test_fields_of_a_strange_type_are_unknown():
    ranks = '{"pid": -1, "rank": "x", "host": 9, "status": [], "collective_counts": {"A": "x"}}'
    groups = f'{{}}, 3, null, {{"ranks": 7, "size": -1, "hash": 8}}, {{"ranks": [{ranks}]}}'
    for group in parsed(f'{{"communicators": [{groups}], "ras": 1}}').communicators:
        assert group.size == 0
        assert all(one.pid == 0 and one.rank == -1 for one in group.members)


def test_of_a_large_job_those_that_differ_are_told(monkeypatch):
    monkeypatch.setattr(nccl_ras, "_MAX_MEMBERS", 100)
    ranks = [member(number, 1000 + number, AllReduce=90) for number in range(200)]
    ranks[81] = member(81, 1081, AllReduce=89)
    (whole,) = parsed(report(ranks[:100])).communicators
    assert len(nccl_ras.within_limits([whole])[0].members) == 100
    ras = parsed(report(ranks, [missing(900, 1, considered_dead=True)]))
    (group,) = nccl_ras.within_limits(ras.communicators)
    assert [one.rank for one in group.members[:2]] == [81, 900]
    assert len(group.members) == 64
    assert dict(group.usual)["AllReduce"] == 90


def test_of_a_job_too_large_to_be_told_its_own_process_is_known(tmp_path, monkeypatch):
    """It is looked for before the members are bounded."""
    monkeypatch.setattr(nccl_ras, "_MAX_MEMBERS", 50)
    ranks = [member(number, 1000 + number, "10.0.0.2", AllReduce=9) for number in range(100)]
    odd = [missing(100 + number, 20000 + number) for number in range(60)]
    text = report([*ranks, member(160, 1234567)], odd).replace("1234567", "PID")
    with running(tmp_path, answer=text) as port:
        assert asked(port, world=161, allow=True).absent == ""


WRONG = Path(__file__).with_name("data").joinpath("nccl_ras_2.27.txt").read_text()


def test_an_old_report_of_ranks_that_are_behind_or_gone_or_have_failed(tmp_path):
    """An old port is asked for text."""
    with running(tmp_path, version="2.27.3", manner="old", answer=WRONG) as port:
        ras = asked(port, allow=True)
    assert (ras.absent, ras.version, ras.timeouts) == ("", "2.27.3", 3)
    assert ras == parsed(WRONG)
    groups = {group.hash: group for group in ras.communicators}
    broken = groups.pop("514e98cf4e44862b")
    behind = (
        Member(3, "10.0.0.1", 4714, (("AllReduce", 40),)),
        Member(5, "10.0.0.2", 812, (("AllReduce", 40), ("AllGather", 0))),
    )
    usual = (("AllReduce", 41), ("AllGather", 7))
    assert groups == {
        "9723b2ac2b5f5a15": Communicator("9723b2ac2b5f5a15", 8, behind, usual),
        "group 1": Communicator("group 1", 4, ()),
    }
    assert {one.rank: (one.pid, one.missing or one.problem) for one in broken.members} == {
        0: (4711, "error: remote process error"),
        1: (4712, "in initialisation"),
        2: (4713, "missing"),
        5: (812, "unresponsive"),
        6: (813, "dead"),
    }


def test_listeners_of_both_families():
    row = "   0: {0} {0} {1} 00000000:00000000 00:00000000 00000000  1000        0 {2} 1\n"
    v6 = "00000000000000000000000001000000:6D7C"
    rows = [("0100007F:6D7C", "0A", 77), ("0100007F:6D7C", "01", 78), (v6, "0A", 9)]
    text = (
        "  sl  local_address\n" + "".join(row.format(*fields) for fields in rows) + "   2: bad\n"
    )
    found = [(one.address, one.port, one.uid, one.inode) for one in proc.listeners(text)]
    assert found == [("127.0.0.1", 28028, 1000, 77), ("::1", 28028, 1000, 9)]


NODES = {
    "FIRST": [[0, "10.0.0.1", 70], [1, "10.0.0.1", 71]],
    "OTHERS": [[2, "10.0.0.2", 70], [3, "10.0.0.2", 75]],
}


@pytest.mark.parametrize("case", cases(__file__, "cases/nccl_ras.json", "joined"))
def test_who_is_who_in_the_job(case):
    groups = []
    for size, *words in case["groups"]:
        rows = [row for word in words for row in (NODES[word] if type(word) is str else [word])]
        groups.append(Communicator("0x1", size, tuple(Member(*row) for row in rows)))
    own = {int(pid): rank for pid, rank in case.get("own", {"70": 0, "71": 1}).items()}
    whole = nccl_ras.with_world_ranks(groups, own, case.get("world", 4))
    assert [[one.world_rank for one in group.members] for group in whole] == case["ranks"]
