"""The table and the JSON of stacks."""

from dataclasses import replace

import pytest

from nodeready.core.text import sanitise
from nodeready.reports.rank_groups import branches, overtaken
from nodeready.reports.registry import Options
from nodeready.reports.stacks_table import show
from nodeready.runs.stacks.document import (
    VERDICT_KINDS,
    Frame,
    Stacks,
    Statement,
    Suspect,
    Verdict,
    Witness,
)
from tests.builders.stack_fleets import FLEETS, job, stack, stages
from tests.builders.traces import frames
from tests.cases import read_table


def lines(stacks: Stacks, verbose: int = 0) -> list[str]:
    return [line.plain for line in show(stacks, Options(verbose, 80))]


def is_sentence(line: str) -> bool:
    """Whether a terminal wraps the line: a verdict, its reasons, a witness's statement, a hint."""
    words = ("hint: ", "for: ", "against: ", "missing: ")
    return line.startswith(("next", *VERDICT_KINDS, *_WITNESSES)) or line.strip().startswith(words)


_WITNESSES = ("flight recorder", "NCCL RAS", "GPU", "network", "kernel", "logs", "environment",
              "nothing from", " " * 17)  # fmt: skip


@pytest.mark.parametrize("name", FLEETS)
def test_every_line_is_safe_and_the_table_fits_80_columns(name):
    stacks = FLEETS[name]()
    shown = lines(stacks)
    for line in (*shown, *lines(stacks, 1)):
        assert line == sanitise(line, 1_000_000)
        assert line == line.rstrip()
    if name != "hostile":
        assert len(shown) <= 60
        rows = [line for line in shown if not is_sentence(line)]
        assert max(map(len, rows)) <= 80


def test_the_commands_have_the_inventory_of_the_run():
    stacks = replace(FLEETS["hung"](), advice=("look for it: `nodeready cores INVENTORY`",))
    shown = [line.plain for line in show(stacks, Options(inventory="prod.py --sudo"))]
    assert shown[-1].endswith("look for it: `nodeready cores prod.py --sudo`")


@pytest.mark.parametrize(
    ("short", "long", "gone_on"),
    read_table(__file__, "others_have_gone_on_only_when_lines_and_order_say_so"),
)
def test_others_have_gone_on_only_when_lines_and_order_say_so(short, long, gone_on):
    first, second = (tuple(Frame(*row) for row in frames(text)) for text in (short, long))
    stacks = job((stack(first, [0]), "S"), (stack(second, [1]), "S"), size=2)
    assert overtaken(stacks) == ({0} if gone_on else set())
    text = "\n".join(lines(stacks))
    assert ("others have gone on from here" in text) == gone_on


def test_a_suspect_and_a_victim_differ_by_word_and_by_colour():
    rows = {}
    for line in show(FLEETS["hung"](), Options(0, 80)):
        word = next((w for w in ("suspect", "victim") if f" {w} " in line.plain), None)
        if word and line.plain.startswith("blocked"):
            rows[word] = {style for text, style in line.parts if text.strip() in (word, "blocked")}
    assert rows["suspect"].isdisjoint(rows["victim"])


def test_the_first_process_below_that_has_a_hint_says_it():
    """A process that is no Python may stand before a loader's worker."""
    stacks = FLEETS["hung"]()
    late = stacks.groups[0]
    worker, other = late.children
    more = replace(late, children=(other, worker, replace(worker, processes=2)))
    shown = lines(replace(stacks, groups=(more, *stacks.groups[1:])))
    assert sum(f"hint: {worker.hint}" in line for line in shown) == 1


def test_forty_groups_are_cut_with_the_largest_in_sight():
    shown = lines(FLEETS["many"]())
    assert "             and 23 more groups (-v shows them)" in shown
    assert any(line.startswith("blocked      ranks 0,40-511  gpu[001,006-064]") for line in shown)
    every = lines(FLEETS["many"](), 1)
    assert sum(line.startswith("blocked") for line in every) == 40


def test_131072_ranks_fit():
    shown = lines(stages())
    assert len(shown) < 30
    assert "ranks 0-131064/8" in "\n".join(shown)
    assert max(map(len, shown)) <= 85


@pytest.mark.parametrize("count", [150, pytest.param(1500, marks=pytest.mark.nightly)])
def test_ranks_deep_in_a_recursion_are_a_tree_that_can_be_shown(count):
    """Each rank is one call deeper than the one before: as many branches."""
    calls = tuple(Frame("solve", "tree.py", 7) for _ in range(count))
    groups = [(stack(calls[: depth + 1], [depth]), "R") for depth in range(count)]
    stacks = job(*groups, size=count)
    assert len(lines(stacks)) < 60
    *_, last = branches(stacks, max_branches=9999, max_depth=9999)
    assert (last.ranks, last.depth, last.ends) == ((count - 1,), count - 1, 1)


@pytest.mark.parametrize("width", [80, 120, 100_000])
def test_the_verdict_its_reasons_and_the_witnesses_are_whole(width):
    """A terminal wraps them."""
    words = "the words go on " * 40 + "until their end"
    sentences = [f"{name}: {words}" for name in ("for", "against", "missing", "text", "states")]
    suspect = Suspect((7,), ("gpu001",), (sentences[0],), (sentences[1],))
    verdict = Verdict("late", sentences[3], (suspect,), (sentences[2],))
    witness = Witness("kernel", (), (Statement(sentences[4], (7,), (), 1),))
    stacks = replace(FLEETS["hung"](), verdict=verdict, witnesses=(witness,))
    shown = "\n".join(line.plain for line in show(stacks, Options(width=width)))
    assert [sentence for sentence in sentences if sentence not in shown] == []
