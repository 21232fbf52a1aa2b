"""What NCCL, RCCL and gloo say in a log, by an expert's reading of lines from public issues."""

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeready.agent.witnesses import nccl_errors, nccl_log
from nodeready.agent.witnesses.nccl_log import read_log
from nodeready.core import wire
from tests.cases import cases


@pytest.mark.parametrize("case", cases(__file__, "cases/nccl_logs.toml"))
def test_an_experts_reading_of_public_lines(case):
    log = read_log(case["lines"].splitlines())
    keys = {error.key for rank in log.ranks for error in rank.errors}
    assert keys | {error.key for error in log.errors} == set(case["errors"])
    assert len(log.ranks) == len(case["ranks"])
    pairs = zip(log.ranks, case["ranks"], strict=True)
    assert [_reading(rank, expected) for rank, expected in pairs] == case["ranks"]


def _reading(rank, expected):
    """The fields of a rank that the expert has read; TOML has no None."""
    fields = {n: list(v) if isinstance(v, tuple) else v for n, v in vars(rank).items()}
    fields["own"] = [error.key for error in rank.errors]
    fields["peers"] = [error.peer for error in rank.errors]
    return {name: "none" if fields[name] is None else fields[name] for name in expected}


def test_the_table_is_sound():
    """Its patterns and sources are tests/unit/test_knowledge.py's."""
    for error in nccl_errors.ERRORS:
        assert error.role in {"cause", "victim", "follows", "note"}
        assert all((*error.needles.split("|"), error.meaning, error.step))


@pytest.mark.parametrize("line", [
    "NCCL INFO " * 400,
    "h:1:1 [0] NCCL INFO " + "[0]a:1/IB " * 300,
    "h:1:1 [0] NCCL INFO NET/IB : Using " + "[0]mlx5_0:1/IB " * 300,
    "a" * 100_000 + ":1:1 [0] NCCL WARN " + "x" * 100_000,
    "h:999999999:1 [9999] NCCL INFO comm 0x1 rank 9999999 nranks 9999999 cudaDev 9999",
    "h:1:1 [0] NCCL INFO comm 0x1 rank 7 nranks 2 cudaDev 0 - Init START",
    "h:1:1 [0] NCCL INFO Using network \x1b[31m",
    "h:1:1 [0] NCCL INFO Bootstrap : Using " + ":" * 2000,
    "Got completion " + "error " * 400,
    "connect " * 300,
])  # fmt: skip
def test_any_line_is_read_within_bounds(line):
    log = read_log([line] * 50)
    for rank in log.ranks:
        assert len(rank.hcas) <= nccl_log.MAX_HCAS
        assert all(len(text) <= 200 for text in vars(rank).values() if isinstance(text, str))
        assert rank.rank is None or rank.rank < rank.world_size


WORDS = sorted({
    word for case in cases(__file__, "cases/nccl_logs.toml")
    for word in re.split(r"(?<= )", case.values[0]["lines"])
})  # fmt: skip


# A busy machine is slow to draw.
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(st.sampled_from(WORDS), max_size=40).map("".join), max_size=20))
def test_words_in_any_order_are_read_within_bounds(lines):
    for rank in read_log("".join(lines).splitlines()).ranks:
        assert rank.rank is None or rank.world_size is None or rank.rank < rank.world_size
        assert len(rank.errors) <= nccl_log.MAX_ERRORS
        assert len(rank.transports) <= 16
        assert all(len(error.text) <= nccl_log.MAX_TEXT for error in rank.errors)
        assert wire.decode(type(rank), json.loads(json.dumps(wire.plain(rank)))) == rank


def test_a_log_of_many_processes_is_bounded():
    log = read_log(
        f"h{n}:{n}:{n} [0] NCCL INFO comm 0x1 rank {n} nranks 5000 - Init START"
        for n in range(5000)
    )
    assert len(log.ranks) == nccl_log.MAX_RANKS
