"""The rank of each line of a mixed log: 40 logs in all forms, and numbers that are no ranks."""

import random
from pathlib import Path

import pytest

from nodeready.agent.log_lines import learn_file, read_ranks, text_lines
from nodeready.agent.log_ranks import LineOrigin, learn_ranks
from nodeready.agent.postmortem import file_failures
from tests.cases import cases, with_table

LOGS = sorted((Path(__file__).parent / "cases" / "mixed_logs").glob("*.log"))


def expected(row: str) -> tuple[LineOrigin, str]:
    """The origin that a row of a case begins with, and the line."""
    words, _, line = row.partition("\t")
    host, rank, local = ("" if word == "-" else word for word in words.rsplit(" ", 2))
    return LineOrigin(host, int(rank) if rank else None, int(local) if local else None, ""), line


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_the_origin_of_each_line(path):
    _, *rows = path.read_text().splitlines()
    origins, lines = zip(*map(expected, rows), strict=True)
    reader = learn_ranks(lines)
    assert [reader.split(line)._replace(text="") for line in lines] == list(origins)
    assert reader.is_mixed == (not path.stem.startswith("not_"))
    assert all(line.endswith(reader.split(line).text[-8:]) for line in lines)


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_tail_and_postmortem_know_the_same_writers(path, tmp_path):
    _, *rows = path.read_text().splitlines()
    log = tmp_path / "job.log"
    log.write_text("\n".join(row.partition("\t")[2] for row in rows) + "\n")
    data = log.read_bytes()
    with log.open("rb") as file:
        lines = text_lines(data, is_whole=True)
        reader = learn_file(file.fileno(), len(data), lines, path=str(log))
        ranks = read_ranks(file.fileno(), len(data), reader, 10)
        failures = file_failures(file.fileno(), str(log), 1 << 20)
    writers = {rank.origin.key for rank in ranks if rank.origin.is_known}
    streams = {LineOrigin(s.host, s.rank, s.local_rank, "").key for s in failures.streams}
    assert streams - {("", None, None)} == (
        writers if reader.is_mixed else {origin.key for origin in reader.origins}
    )


_ERROR = ['  File "/srv/train.py", line 9, in main', '    x = y["a"]', "KeyError: 'a'"]
_LOST = [
    '  File "/srv/train.py", line 12, in main',
    "RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.2]:4711",
]


def prefixed(case, rank, rows):
    values = {"r": rank, "next": rank + 1, "half": rank // 2, "odd": rank % 2, "pid": 8810 + rank}
    prefix = case["prefix"].format(**values, name=["alpha", "beta", "gamma", "delta"][rank])
    return [prefix + row for row in rows]


def own_error(lines, tmp_path):
    """The failures of a log, the rank that its only error of its own has, and tail's writers."""
    log = tmp_path / "job.log"
    log.write_bytes("\n".join(lines).encode())
    with log.open("rb") as file:
        failures = file_failures(file.fileno(), str(log), 1 << 20)
        rows = text_lines(log.read_bytes(), is_whole=True)
        reader = learn_file(file.fileno(), log.stat().st_size, rows, path=str(log))
    (event,) = (event for event in failures.events if event.role == "failed")
    assert (event.text, event.frame) == ("KeyError: 'a'", "train.py:9 in main")
    number = event.local_rank if event.ranks == () else event.ranks[0]
    word = "" if number is None else "local " if event.ranks == () else ""
    return failures, word + ("" if number is None else str(number)), reader


@pytest.mark.parametrize("case", cases(__file__, "cases/prefixes.toml"))
def test_a_traceback_behind_a_prefix(case, tmp_path):
    header = "Traceback (most recent call last):"
    lines = [
        line
        for step in range(6)
        for rank in range(4)
        for line in prefixed(case, rank, [f"step {step} loss 2.{(step * 7 + rank * 3) % 10}"])
    ]
    lines += prefixed(case, 2, [header, *_ERROR])
    lines += [line for rank in (0, 1, 3) for line in prefixed(case, rank, [header, *_LOST])]
    _, rank, reader = own_error(lines, tmp_path)
    assert rank == case["rank"]
    known = {origin.rank for origin in reader.origins if origin.rank is not None}
    assert known == ({0, 1, 2, 3} if rank.isdigit() else set())
    failures, rank, _ = own_error(prefixed(case, 3, [header, *_ERROR]), tmp_path)
    assert rank == case["alone"]
    assert failures.unknown_prefix == case["unknown"]


@with_table("prefix, rank")
def test_a_logger_puts_its_prefix_before_the_first_line_alone(prefix, rank, tmp_path):
    traceback = ["Traceback (most recent call last):", *_ERROR]
    end = "2025-03-10 10:41:59 INFO done"
    failures, told, _ = own_error([prefix + traceback[0], *traceback[1:], end], tmp_path)
    assert told == rank
    assert [s.last for s in failures.streams if s.last.endswith("done")] == [end]


@pytest.mark.parametrize("case", cases(__file__, "cases/no_writers.toml"))
def test_columns_that_tell_no_writer(case):
    rnd = random.Random(1)
    rows = case["lines"] * 6
    lines = [row.replace("#", str(rnd.randrange(90))) for row in rows]
    assert not learn_ranks(lines).is_mixed, learn_ranks(lines).origins


@with_table("line, text")
def test_the_text_without_its_prefixes(line, text):
    assert learn_ranks([line]).split(line).text == text


def test_a_file_of_one_rank_may_quote_others():
    lines = ["[rank3]: a", "[rank0]: quoted"]
    assert not learn_ranks(lines, path="/r/attempt_0/1/stderr.log").is_mixed
    assert learn_ranks(lines, path="/log/slurm.4711.out").is_mixed
    labelled = [f"{rank}: step {step}" for step in range(9) for rank in (1, 0, 2)]
    assert learn_ranks(labelled, path="/log/rank_0.log").is_mixed


def test_a_number_that_stands_once_does_not_hide_the_ranks():
    lines = [f"{rank}: step {step}" for step in range(8) for rank in (2, 0, 3, 1)]
    reader = learn_ranks(["2026: start of the batch script", *lines])
    assert {origin.rank for origin in reader.origins} == {0, 1, 2, 3, 2026}


def test_a_pattern_in_place_of_what_is_learned():
    lines = [
        f"<{rank}@gpu{rank // 2}> [rank9]: step {step}" for step in (1, 2) for rank in range(4)
    ]
    assert {origin.rank for origin in learn_ranks(lines).origins} == set()
    reader = learn_ranks(lines, pattern=r"^<(?P<rank>\d+)@(?P<host>\w+)> ")
    assert reader.split(lines[2]) == LineOrigin("gpu1", 2, None, "[rank9]: step 1")
    reader = learn_ranks(lines, pattern=r"<(\d+)@")
    assert reader.split(lines[3]).rank == 3
    assert learn_ranks(lines, pattern="step (.*)").split("step x").rank is None
    assert learn_ranks(lines, pattern=r"(\d+)").split("9" * 5000).rank is None


FORMS = ("{}: {}", "[{}] {}", "[{}]: {}", "[step{}]: {}", "[gpu{}:{}] ", "epoch{}: {}", "it/{} {}")


@pytest.mark.parametrize("seed", range(20))
def test_numbers_that_only_grow_are_never_ranks(seed):
    """With equal texts or different ones, a few lines each or many."""
    rnd = random.Random(seed)
    number, numbers = 0, []
    for _ in range(rnd.choice((6, 40, 100))):
        number += rnd.choice((0, 0, 1, 1, 2, rnd.randrange(9)))
        numbers += [number] * rnd.choice((1, 1, 2, 8))
    words = rnd.choice((["step"], [f"loss {rnd.random()}" for _ in range(50)]))
    for form in FORMS:
        lines = [form.format(number, rnd.choice(words)) for number in numbers]
        assert not learn_ranks(lines).is_mixed


def test_hostile_lines_cost_no_time_and_no_exception():
    many = [
        *("[" * 9000, "9" * 9000 + ": x", "(" + "a " * 4000 + "pid=", "rank " * 2000, "| " * 3000),
        *(
            "\x1b[" * 3000,
            "[rank99999999]: x",
            "a" * 300 + ": x",
            "[1," + "1" * 400 + "]<stdout>:",
        ),
        *("NCCL " * 2000, "h:1:1 [0] " + "x" * 5000, "[PG ID 0 PG GUID 0(", "[" * 200 + "R" * 200),
    ]
    for text in many:
        lines = [text] * 20 + [f"{rank}: {text}" for rank in (0, 1, 0, 1)]
        reader = learn_ranks(lines)
        assert all(isinstance(reader.split(line), LineOrigin) for line in lines)
