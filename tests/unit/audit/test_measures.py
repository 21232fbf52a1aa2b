"""The looks of a watch: a node whose answer differs in measures alone is not judged again."""

import base64
import random
import re
import time

import pytest

from nodeready import knowledge
from nodeready.core import probe_script
from nodeready.core.policy import Policy
from nodeready.core.result import ALONE
from nodeready.runs.audit import answer_judge, command, measures
from nodeready.subjects import snapshot
from tests.builders.hostile import look, shows
from tests.cases import read_data, read_table
from tests.fake import interrupts, one_by_one
from tests.unit.audit.test_workers import own
from tests.unit.commands import AWAY

POLICY = Policy(ptrace_scope=0)
NONCE = "0" * 16
#: Section, pattern and replacement of a change that a check or a fact shows.
CHANGES = read_table(__file__, "CHANGES")


def measured(sections, draw):
    def drawn(low, high):
        return lambda match: f"{match[1]}{draw.randrange(low, high)}"

    texts = dict(sections)
    for section, pattern, low, high in read_table(__file__, "MEASURES"):
        texts[section] = re.sub(pattern, drawn(low, high), texts[section])
    return texts


def history(number, rounds):
    """What a node shows in each round: other measures in each, and a change or its end in every
    fourth.
    """
    draw, changes, shown = random.Random(number), set(), []
    for _ in range(rounds):
        if draw.random() < 0.25:
            changes = set() if changes else {draw.choice(CHANGES)}
        texts = measured(own("h100", number), draw)
        for section, pattern, new in CHANGES:
            if (section, pattern, new) in changes:
                texts[section] = re.sub(pattern, new, texts[section], count=1)
        shown.append(shows(texts))
    return shown


@pytest.fixture
def watched(run, monkeypatch, tmp_path):
    """``watched(nodes)``: the lines of a watch by round, and how often a node was judged whole."""
    count = 0

    def go(nodes, **more):
        nonlocal count
        count += 1
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / str(count)))
        monkeypatch.setattr(time, "sleep", lambda seconds: print("-- round"))
        judged, keep = [], answer_judge.AnswerJudge.keep

        def counted(self, observed, policy):
            judged.append(policy)
            return keep(self, observed, policy)

        with monkeypatch.context() as patch:
            patch.setattr(answer_judge.AnswerJudge, "keep", counted)
            done = run(nodes, "audit", "--watch", "5", policy=POLICY, **more)
        assert done.code == 130
        text = re.sub(r"(?m)^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "TIME", done.out)
        return text.split("-- round\n")[1:], len(judged)

    return go


def nodes_of(rounds, count=2):
    histories = {f"gpu{number:03}": history(number, rounds) for number in range(count)}
    end = [interrupts]
    return {name: one_by_one(*shown, *end) for name, shown in histories.items()}


@pytest.mark.parametrize(("rounds", "memory"), [
    (60, ""), pytest.param(500, "off", marks=pytest.mark.nightly),
])  # fmt: skip
def test_a_watch_finds_each_change_in_its_round_and_nothing_else(
    watched, monkeypatch, rounds, memory
):
    monkeypatch.setenv("NODEREADY_MEMORY", memory)
    by_bounds, judged = watched(nodes_of(rounds))
    monkeypatch.setattr(answer_judge, "find_bounds", lambda *arguments: None)
    whole, all_judged = watched(nodes_of(rounds))
    assert by_bounds == whole
    assert all_judged == 2 * rounds
    assert judged < all_judged * 0.6
    assert sum(map(bool, whole)) > rounds / 8


def test_a_node_at_a_limit_is_judged_at_each_look(watched):
    """Where a measure decides, there are no bounds: whatever the node shows counts at once."""
    texts = own("h100", 1)
    hot, hotter = (
        {**texts, "nvidia_smi": re.sub(r"(_tlimit>)\d+", rf"\g<1>{left}", texts["nvidia_smi"])}
        for left in (2, 1)
    )
    shown = [shows(texts), shows(hot), shows(hotter), shows(texts), interrupts]
    assert watched({"gpu001": one_by_one(*shown)}) == ([""] * 4, 4)


@pytest.mark.parametrize(("full_s", "times"), [(command._FULL_S, 1), (0.0, 4)])
def test_every_node_is_judged_again_once_an_hour(watched, monkeypatch, full_s, times):
    monkeypatch.setattr(command, "_FULL_S", full_s)
    shown = [shows(own("h100", 1))] * 4
    assert watched({"gpu001": one_by_one(*shown, interrupts)}) == ([""] * 4, times)


def test_a_node_that_was_lost_is_judged_when_it_is_back(watched):
    shown = shows(own("h100", 1))
    lines, judged = watched({"gpu001": one_by_one(shown, AWAY, shown, shown, interrupts)})
    assert judged == 2
    assert [line.split()[1:4] for line in lines if line] == [
        ["unreachable", "gpu001", "n:"], ["ok", "answers", "again"],
    ]  # fmt: skip


def test_a_node_that_lies_harms_itself_alone(watched):
    """It shows its old answer, or another node's: the others are judged by their own answers."""
    changed = history(2, 20)
    liar = one_by_one(*[shows(own("h100", number % 3)) for number in range(20)], interrupts)
    alone, _ = watched({"gpu002": one_by_one(*changed, interrupts)})
    beside, _ = watched({"gpu002": one_by_one(*changed, interrupts), "liar": liar})
    assert any(alone)
    shown = [re.findall(r".*\bgpu002\b.*\n", text) for text in beside]
    assert shown == [text.splitlines(keepends=True) for text in alone]


# --- The bounds.

CHRONY = read_data(__file__, "chrony.txt")


def with_chrony(texts):
    clock = re.sub(r"clock=timesyncd\n.*\nclock_rc=0\n", CHRONY, texts["host_slow"])
    return {**texts, "host_slow": clock}


def bounds_of(texts, policy=POLICY):
    """The text of an answer, its bounds, and what judges another text."""
    text = probe_script.unpack(look(texts, NONCE), NONCE)
    probes = snapshot.probes()

    def observed(text):
        answer = f"{probe_script.mark(NONCE)} plain\n{base64.b64encode(text).decode()}\n"
        answer += f"{probe_script.mark(NONCE)} end\n"
        return snapshot.read(answer, probes, policy, NONCE)

    def statuses(text):
        results = snapshot.judge(observed(text), policy, ALONE, measures.JUDGED)
        return [result.status for result in results]

    return text, measures.find_bounds(text, text, statuses), observed, statuses


@pytest.mark.parametrize("profile", ["h100", "mi300x"])
def test_within_the_bounds_the_verdict_is_the_same(profile):
    draw = random.Random(profile)
    text, bounds, _, statuses = bounds_of(with_chrony(own(profile, 1)))
    assert bounds.contain(text)
    lines = text.split(b"\n")
    assert {b"System", b"Root"} <= {lines[place].split()[0] for place in bounds.places}
    for _ in range(20):
        # The numbers from the last to the first, because each may get longer.
        numbers, lines = [*bounds.ranges], text.split(b"\n")
        for place, row in [*bounds.places.items()][::-1]:
            match = measures._PATTERNS[row].match(lines[place])
            for group in range(match.re.groups, 1, -1):
                decimals = len(match[group].partition(b".")[2])
                number = b"%.*f" % (decimals, draw.uniform(*numbers.pop()))
                start, end = match.span(group)
                lines[place] = lines[place][:start] + number + lines[place][end:]
        other = b"\n".join(lines)
        assert other != text
        assert bounds.contain(other)
        assert statuses(other) == statuses(text)


def test_every_other_byte_is_a_change():
    draw = random.Random(1)
    text, bounds, _, _ = bounds_of(own("h100", 1))
    measured_lines = {*bounds.places}
    for _ in range(300):
        place = draw.randrange(len(text))
        other = text[:place] + bytes([text[place] ^ 1 << draw.randrange(8)]) + text[place + 1 :]
        if text.count(b"\n", 0, place) not in measured_lines:
            assert not bounds.contain(other)


@pytest.mark.parametrize("key", knowledge.read("measures"))
def test_a_measure_is_of_its_subject_and_decides_only_by_its_numbers(key):
    text, bounds, observed, _ = bounds_of(with_chrony(own("h100", 1)))
    lines, moved = text.split(b"\n"), 0
    for place, row in bounds.places.items():
        if [*knowledge.read("measures")][row] == key:
            match = measures._PATTERNS[row].match(lines[place])
            kept = {span for group in range(2, match.re.groups + 1) for span in
                    range(*match.span(group))}  # fmt: skip
            for index in range(match.end(1), match.end()):
                if lines[place][index : index + 1] in b"123456789" and index not in kept:
                    lines[place] = lines[place][:index] + b"7" + lines[place][index + 1 :]
                    moved += 1
    before, after = observed(text), observed(b"\n".join(lines))
    assert moved or "worse" in knowledge.rows("measures")[key]
    subject = key.partition(".")[0]
    assert {**before.subjects, subject: None} == {**after.subjects, subject: None}
    both = [snapshot.judge(looked, POLICY) for looked in (before, after)]
    assert [r.status for r in both[0]] == [r.status for r in both[1]]
