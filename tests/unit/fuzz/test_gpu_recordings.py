"""Whole answers of GPU tools, broken anywhere: judged in bounded time, and never as sound.

The answers are those of the parts in tests/builders and, beside a checkout that has them, those
of real machines.
"""

import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from nodeready.core.base import Output
from nodeready.lab import amd as lab_amd
from tests.builders import gpus as built
from tests.builders.gpus import Node
from tests.builders.gpus_amd import node_of, ran
from tests.paths import SAMPLES
from tests.unit.fuzz.alone import DO
from tests.unit.subjects.test_gpus_nvidia_values import recorded

#: Mutations of each answer, and seconds of CPU time for each.
TRIES = {"short": 10, "long": 1500}
SECONDS = 10
VALUES = (
    "NaN", "nan", "-1", "-99999", "1e400", "Infinity", "9" * 400, "0x7fffffffffffffff", "", "null",
    "N/A", "[GPU is lost]", "Unknown Error", "ERR!", "4294967295", "18446744073709551615",
    "\x00", "\udcff", "\u202e", "&a;", "&#0;", "<x>", "]]>", "{}", '"', "true", "[[[[",
)  # fmt: skip
BOMB = (
    '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa">'
    + "".join(f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in pairwise("abcdefghi"))
    + "]>"
)


def wrapped(piece: str, depth: int) -> str:
    """This piece as deep as that, as JSON and as XML."""
    return "[" * depth + "<a>" * depth + piece


def mutations(text: str, draw: random.Random) -> Iterator[str]:
    """This text, broken again and again in one or a few places."""
    numbers = [match.span() for match in re.finditer(r"(?<=[>: \"])-?[0-9]+(?=[ <,\"])", text)]
    lines = text.split("\n")
    while True:
        broken = text
        for _ in range(draw.choice((1, 1, 2, 5))):
            at, size = draw.randrange(len(broken) + 1), draw.randrange(1, 3000)
            kind = draw.randrange(9)
            if kind == 0:
                broken = broken[:at]
            elif kind == 1:
                broken = broken[:at] + broken[at + size :]
            elif kind == 2:
                broken = broken[:at] + broken[at : at + size] * draw.choice((2, 50)) + broken[at:]
            elif kind == 3:
                broken = broken[at:] + broken[:at]
            elif kind == 4 and numbers:
                start, end = draw.choice(numbers)
                broken = text[:start] + draw.choice(VALUES) + text[end:]
            elif kind == 5:
                broken = broken[:at] + draw.choice(VALUES) + broken[at:]
            elif kind == 6:
                broken = broken[:at] + wrapped(draw.choice(VALUES), 20_000) + broken[at:]
            elif kind == 7:
                shuffled = lines[:]
                one, other = (draw.randrange(len(lines)) for _ in range(2))
                shuffled[one], shuffled[other] = shuffled[other], shuffled[one]
                shuffled.insert(other, lines[one])
                broken = "\n".join(shuffled)
            else:
                broken = BOMB + broken.replace("Enabled", "&i;", 3)
        yield broken[: 1 << 20]


def nvidia_nodes() -> dict[str, Node]:
    nodes = {f"{part} {driver}": built.node(part, driver) for part, driver in built.combinations()}
    chosen = dict(list(nodes.items())[::7])
    for path in sorted((SAMPLES / "nvidia-smi").glob("*.xml")):
        chosen[path.name] = recorded(path.read_text())
    return chosen


def amd_nodes() -> dict[str, Node]:
    printed = lab_amd.outputs()
    buses = [f"0000:{bus}:00.0" for bus in ("05", "29", "49", "65", "85", "a9", "c9", "e5")]
    bus = "".join(built.pci(a, "0x1002", "0x74a1", "0x120000", driver="amdgpu") for a in buses)
    nodes = {"amd-smi": node_of(ran(printed), bus)}
    for path in sorted((SAMPLES / "rocm-smi").glob("*.json")):
        nodes[path.name] = node_of(ran({"rocm": path.read_text()}, "have=rocm-smi\n"), bus)
    return nodes


#: The section that is broken -> the nodes.
NODES: dict[str, Callable[[], dict[str, Node]]] = {
    "smi": nvidia_nodes, "links": nvidia_nodes, "amd": amd_nodes,
}  # fmt: skip


def sound(node: Node) -> set[str]:
    return {name for name, result in node.judged().items() if result.status == "ok"}


@pytest.mark.parametrize("section", NODES)
def test_a_broken_answer_makes_no_check_ok_that_was_not(section, effort):
    """And none is an error of ours, or takes long."""

    def tried() -> None:
        for name, node in NODES[section]().items():
            draw = random.Random(name)
            output: Output = getattr(node, section)
            before = sound(node)
            texts = mutations(output.text, draw)
            for number in range(TRIES[effort]):
                text = next(texts)
                broken = replace(node, **{section: replace(output, text=text)})
                began = time.process_time()
                wrong = sound(broken) - before
                assert not wrong, (name, number, wrong)
                assert time.process_time() - began < SECONDS, (name, number)

    DO[effort](tried, 3000)


#: Section -> the text behind which nothing that is missing makes a GPU look sound. A listing of
#: NVLinks that ends early at a line's end is that of cards without a bridge: its status tells.
WHOLE = {"smi": "</nvidia_smi_log>", "amd": "\n@a1 ran 0\n\n@a1 run xgmi"}


@pytest.mark.parametrize("section", WHOLE)
def test_half_an_answer_is_no_sound_gpu(section, effort):
    """Only those checks are ok that need no answer of this tool."""

    def tried() -> None:
        for name, node in NODES[section]().items():
            draw = random.Random(name)
            output: Output = getattr(node, section)
            silent = sound(replace(node, **{section: replace(output, text="x")}))
            last = output.text.rfind(WHOLE[section]) % len(output.text) - 1
            for at in (last, *(draw.randrange(1, last) for _ in range(TRIES[effort] // 3))):
                half = replace(node, **{section: replace(output, text=output.text[:at])})
                assert sound(half) <= silent, (name, at, sound(half) - silent)

    DO[effort](tried, 3000)
