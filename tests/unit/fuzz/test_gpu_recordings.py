"""Whole answers of GPU tools, broken anywhere: judged in bounded time, and never as sound.

The answers are those of the parts in tests/builders and, beside a checkout that has them, those
of real machines.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeready.core.base import Output
from nodeready.lab import amd as lab_amd
from tests.builders import gpus as built
from tests.builders.gpus import Node
from tests.builders.gpus_amd import node_of, ran
from tests.builders.hostile import mutated
from tests.paths import SAMPLES
from tests.unit.fuzz.alone import DO
from tests.unit.subjects.test_gpus_nvidia_values import recorded

BOMB = (
    '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa">'
    + "".join(f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in pairwise("abcdefghi"))
    + "]>"
)
DEEP = "[" * 20_000 + "<a>" * 20_000


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


def answering(node: Node, section: str, text: str) -> Node:
    output: Output = getattr(node, section)
    return replace(node, **{section: replace(output, text=text)})


def sound(node: Node) -> set[str]:
    return {name for name, result in node.judged().items() if result.status == "ok"}


@pytest.mark.parametrize("section", NODES)
def test_a_broken_answer_makes_no_check_ok_that_was_not(section, effort):
    """And none is an error of ours, or takes long."""
    nodes = NODES[section]()
    before = cache(lambda name: sound(nodes[name]))

    @given(st.sampled_from([*nodes]), st.data())
    def each(name: str, data: st.DataObject) -> None:
        text = getattr(nodes[name], section).text
        bomb = BOMB + text.replace("Enabled", "&i;", 3)
        deep = text[: len(text) // 2] + DEEP + text[len(text) // 2 :]
        spoilt = data.draw(mutated(text, text, bomb, deep))
        assert sound(answering(nodes[name], section, spoilt)) <= before(name)

    DO[effort](each, 3000)


#: Section -> the text behind which nothing that is missing makes a GPU look sound. A listing of
#: NVLinks that ends early at a line's end is that of cards without a bridge: its status tells.
WHOLE = {"smi": "</nvidia_smi_log>", "amd": "\n@a1 ran 0\n\n@a1 run xgmi"}


@pytest.mark.parametrize("section", WHOLE)
def test_half_an_answer_is_no_sound_gpu(section, effort):
    """Only those checks are ok that need no answer of this tool."""
    nodes = NODES[section]()
    silent = cache(lambda name: sound(answering(nodes[name], section, "x")))

    @given(st.sampled_from([*nodes]), st.one_of(st.just(1.0), st.floats(0, 1)))
    def each(name: str, where: float) -> None:
        text = getattr(nodes[name], section).text
        last = text.rfind(WHOLE[section]) % len(text) - 1
        half = answering(nodes[name], section, text[: 1 + int(where * (last - 1))])
        assert sound(half) <= silent(name)

    DO[effort](each, 3000)
