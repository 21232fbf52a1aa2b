"""The rank of each line of a mixed log: 40 logs in all forms, and numbers that are no ranks."""

import random
from pathlib import Path

import pytest

from nodeready.agent.log_ranks import LineOrigin, learn_ranks
from tests.cases import read_table

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


@pytest.mark.parametrize(("line", "text"), read_table(__file__, "the_text_without_its_prefixes"))
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
