"""The program of the node, on this machine's own files: what a pattern finds, and its bounds."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from nodeready.agent import log_lines, path_pattern
from nodeready.agent import tail as program
from nodeready.agent.tail import MAX_ANSWER, NodeTail, TailConfig, read_tail
from nodeready.core import wire
from nodeready.runs.tail import parse_tail
from tests.cases import cases


def tail(pattern: object, **how: object) -> NodeTail:
    # A busy machine is slow, and nothing else.
    return read_tail(TailConfig("N", "nodeready:test", str(pattern), **{"limit_s": 300, **how}))


FILES = ("a/1.log", "a/b/2.log", "a/b/c/3.log", "a/.hidden/4.log", "x[1].log")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for number, name in enumerate(FILES):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n")
        os.utime(path, (1_800_000_000 + number,) * 2)
    (tmp_path / "latest").symlink_to("a")
    (tmp_path / "a/b/loop").symlink_to("..")
    return tmp_path


@pytest.mark.parametrize("case", cases(__file__, "cases/patterns.json"))
def test_the_files_of_a_pattern(tree, case):
    seen = tail(f"{tree}/{case['name']}")
    assert sorted(file.path for file in seen.files) == [f"{tree}/{path}" for path in case["paths"]]
    assert (seen.unread, seen.error) == ((), "")
    assert parse_tail(wire.packed_line("N", "tail", seen), "N") == seen


def test_of_many_files_those_that_were_written_last(tree):
    seen = tail(f"{tree}/**/*.log", max_files=2)
    names = [file.path.rpartition("/")[2] for file in seen.files]
    assert (names, seen.left_out) == (["x[1].log", "3.log"], 2)
    late = tail(f"{tree}/**/*.log", since_s=1_800_000_002)
    assert (len(late.files), late.older) == (2, 2)


def test_an_answer_has_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "MAX_ANSWER", MAX_ANSWER // 8)
    for number in range(8):
        (tmp_path / f"{number}.log").write_text("\n".join(["ü" * 1900] * 12))
    monkeypatch.setattr(path_pattern, "MAX_NAMES", 8)
    seen = tail(f"{tmp_path}/*", lines=12)
    assert len(seen.files) == 8
    assert "lines are missing" in seen.error
    assert sum(len(line) for file in seen.files for line in file.lines) < MAX_ANSWER // 8
    # No more is kept meanwhile than twice as much.
    kept = program.TailAnswer(TailConfig("N", "nodeready:test", ""))
    for file in seen.files * 3:
        kept.add_file(f"{len(kept.files)}", [replace(file, lines=("x" * 30_000,))])
        assert kept.size <= 2 * program.MAX_ANSWER
    (tmp_path / "8.log").touch()
    assert "names: only some were looked at" in tail(f"{tmp_path}/*", lines=1).error
    # The kernel's own files are not walked through.
    assert tail("/proc/**/status").files == ()
    assert [file.path for file in tail("/proc/self/mountinfo").files] == ["/proc/self/mountinfo"]


def test_a_mistake_in_the_fork_is_an_error(tree, monkeypatch):
    monkeypatch.setattr("nodeready.agent.tail.TailReader.read", lambda *_: 1 / 0)
    seen = tail(f"{tree}/a/*.log", limit_s=30)
    assert seen.error == "its own reader broke off"
    assert [file.reason for file in seen.unread] == ["not read within 30 s"]


def labelled(ranks: int, rounds: int, silent: int = -1, since: int = 0) -> str:
    """The lines of srun --label: in each round each rank writes, but one that fell silent."""
    return "".join(
        f"{rank}: step {step} of {rank}\n"
        for step in range(rounds)
        for rank in sorted(range(ranks), key=lambda rank: (rank * 7 + step) % ranks)
        if rank != silent or step < since
    )


def test_a_mixed_log_is_read_back_until_each_rank_has_its_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(log_lines, "_BLOCK_BYTES", 4096)
    path = tmp_path / "slurm.4711.out"
    path.write_text(f"loading\n{labelled(8, 1000, 5, 400)}srun: error: task 5: Exited\n")
    (lost, *known) = tail(path, lines=2).files
    assert (lost.rank, lost.lines) == (None, ("srun: error: task 5: Exited",))
    assert [(log.rank, log.is_mixed) for log in known] == [(rank, True) for rank in range(8)]
    assert {log.lines for log in known if log.rank != 5} == {
        (f"step 998 of {rank}", f"step 999 of {rank}") for rank in range(8) if rank != 5
    }
    assert known[5].lines == ("step 398 of 5", "step 399 of 5")
    assert 4_200 <= known[5].lines_after <= 4_216
    with path.open("a") as file:
        file.write("3:  1%|\r 50%|#\r 99%|##\n4: \n2: end\r\n")
    bars = {log.rank: log.lines[-1] for log in tail(path, lines=1).files if log.rank in (2, 3, 4)}
    assert bars == {2: "end", 3: " 99%|##", 4: "step 999 of 4"}
    # It is not searched for without end.
    monkeypatch.setattr(log_lines, "MAX_BYTES", 8192)
    silent = tail(path, lines=2).files[6]
    assert (silent.rank, silent.lines) == (5, ())
    assert 0 < silent.lines_after < 1000


def test_the_lines_of_chosen_ranks(tmp_path):
    for rank in range(4):
        (tmp_path / f"rank_{rank}.log").write_text(f"[rank{rank}]: step 1\n")
    (tmp_path / "all.out").write_text(labelled(8, 20))
    seen = tail(f"{tmp_path}/*", lines=1, ranks=((2, 6, 4), (3, 3, 1)))
    names = [(log.path.rpartition("/")[2], log.rank, log.is_mixed) for log in seen.files]
    mixed = [("all.out", rank, True) for rank in (2, 3, 6)]
    assert sorted(names) == [*mixed, ("rank_2.log", None, False), ("rank_3.log", None, False)]
    assert seen.other_ranks == 2
    # Files with the wanted ranks go first.
    seen = tail(f"{tmp_path}/rank*", ranks=((2, 2, 1),), max_files=1)
    assert [log.path for log in seen.files] == [f"{tmp_path}/rank_2.log"]
    counted = tail(f"{tmp_path}/all.out", grep="step 1[0-9]", lines=1, ranks=((0, 1, 1),))
    found = [(log.matches, log.lines) for log in counted.files]
    assert found == [(10, (f"step 19 of {rank}",)) for rank in (0, 1)]
    own = tail(f"{tmp_path}/all.out", lines=1, rank_pattern=r"of (\d)$")
    assert [log.lines for log in own.files][7] == ("7: step 19 of 7",)


def test_an_answer_of_too_many_ranks_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "MAX_TAILS", 5)
    (tmp_path / "all.out").write_text(labelled(8, 20))
    seen = tail(f"{tmp_path}/all.out")
    assert [log.rank for log in seen.files] == [0, 1, 2, 3, 4]
    assert "more than 5 ranks and files" in seen.error
