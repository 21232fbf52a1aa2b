"""Node sets: what is taken, what is refused, and that folding loses nothing."""

from __future__ import annotations

import random

import pytest

from nodeready.inventory.nodeset import MAX_NODES, NodeSetError, expand, fold, split


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu[001-003,007],login1", ["gpu001", "gpu002", "gpu003", "gpu007", "login1"]),
        ("n10,n9,n9", ["n9", "n10"]),
        ("a[09-11]", ["a09", "a10", "a11"]),
        ("a[1-10/4]", ["a1", "a5", "a9"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
        ("gpu[1-2]-ib0.c1", ["gpu1-ib0.c1", "gpu2-ib0.c1"]),
        ("10.0.0.[9-10]", ["10.0.0.9", "10.0.0.10"]),
        ("[fe80::1],::1,fe80::2%eth0", ["::1", "fe80::1", "fe80::2%eth0"]),
        ("@local", ["@local"]),
        ("@docker/ubuntu:22.04, a", ["@docker/ubuntu:22.04", "a"]),
        (" a ,,b,", ["a", "b"]),
        ("", []),
    ],
)
def test_expands_to_names_in_natural_order(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("gpu[001-064", "missing bracket"),
        ("gpu001-064]", "closing bracket"),
        ("gpu[g[1-2]", "missing bracket"),
        ("gpu[g[1-2]]", "brackets within brackets"),
        ("gpu[x[1-999999999]", "missing bracket"),
        ("gpu[1-9999999999,login", "missing bracket"),
        ("gpu[64-1]", "'64-1' is no range"),
        ("gpu[001-64]", "'001-64' is no range"),
        ("gpu[]", "is no range"),
        ("gpu[1-9/0]", "is no range"),
        ("gpu[a-z]", "is no range"),
        ("gpu[\u0661-\u0669]", "is no range"),
        ("gpu[1-99999999]", "has 99,999,999 nodes; the most is 65,536"),
        ("r[1-999]n[1-999]", "the most is 65,536"),
        ("n[1-999999999999999999999]", "is no range"),
        ("a[1-40000],b[1-40000]", "more than 65,536"),
        ("gpu[1-3]!gpu2", "set operators are not taken"),
        ("a;reboot", "is no host name"),
        ("$(reboot)", "is no host name"),
        ("`reboot`[1-2]", "is no node set"),
        ("a\nb", r"'a\nb' is no host name"),
        ("a\x1b[31m", r"\x1b"),
        ("a\x00b", r"\x00"),
        ("g\u0440u1", r"g\u0440u1"),
        ("a b", "is no host name"),
        ("-oProxyCommand=reboot", "begins with a dash"),
        ("-[1-2]", "begins with a dash"),
        ("@docker/$(reboot)", "is no host name"),
        ("@ssh/-oX", "is no host name"),
        ("alice@gpu1", "ssh_user"),
        ("gpu1:22", "ssh_port"),
        ("n" * 254, "is no host name"),
        ("../etc", "is no host name"),
        ("gpu[1-64]999999999", "its numbers are too large"),
    ],
)
def test_refuses_what_names_no_nodes_in_one_line(text: str, why: str) -> None:
    with pytest.raises(NodeSetError) as caught:
        expand(text)
    message = str(caught.value)
    assert why in message
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 200


def test_splits_at_commas_outside_of_brackets() -> None:
    assert split("gpu[1,3],b, c[2,4-5]") == ["gpu[1,3]", "b", "c[2,4-5]"]


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([], ""),
        (["gpu002", "gpu001", "gpu001", "gpu010"], "gpu[001-002,010]"),
        (["gpu9", "gpu10", "login1"], "gpu[9-10],login1"),
        (["r1n1", "r1n2", "r2n1", "r2n2"], "r[1-2]n[1-2]"),
        (["@local"], "@local"),
        (["b1", "@docker/x:1", "a;b", "a[1-3]", "fe80::1"], "b1,@docker/x:1,a;b,a[1-3],fe80::1"),
        (["10.1.1.1", "10.2.2.1", "10.3.3.4", "10.3.3.5"], "10.1.1.1,10.2.2.1,10.3.3.[4-5]"),
    ],
)
def test_folds_names(names: list[str], folded: str) -> None:
    assert fold(names) == folded


@pytest.mark.parametrize(
    "shape", ["gpu{c:05d}", "r{a}-n{b}", "10.{a}.{b}.{d}", "ip-{a}-{b}-{d}.ec2"]
)
def test_ten_thousand_names_survive_folding(shape: str) -> None:
    draw = random.Random(7)
    names = {
        shape.format(a=draw.randrange(250), b=draw.randrange(250), c=c, d=draw.randrange(250))
        for c in range(10_000)
    }
    assert set(expand(fold(names))) == names


def test_the_largest_set_is_taken() -> None:
    assert len(expand(f"n[1-{MAX_NODES}]")) == MAX_NODES


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        # 9 and 10 are one range, 09 and 100 are none, and each keeps its digits.
        (["a9", "a10", "a09", "a010"], "a[9,09-10,010]"),
        (["a99", "a100", "a099"], "a[99,099-100]"),
        (["a0", "a1", "a10", "a00"], "a[0-1,00,10]"),
        # Two and three numbers are products of ranges, as far as they are.
        ([f"r{a}n{b}" for a in (1, 2, 4) for b in (7, 8)], "r[1-2,4]n[7-8]"),
        (["r1n1", "r1n2", "r2n2"], "r1n[1-2],r2n2"),
        ([f"c{a}r{b}n{c}" for a in (0, 1) for b in (0, 1) for c in (5, 6)], "c[0-1]r[0-1]n[5-6]"),
        ([f"g{a}.rack{a // 2}" for a in range(4)], "g[0-1].rack0,g[2-3].rack1"),
        # In the order that a person reads, whatever shape the names have.
        (["n2", "n1-ib", "m", "n", "n10", "1n"], "1n,m,n,n1-ib,n[2,10]"),
        # No node set counts so far.
        ([f"n{'1' * 30}", f"n{'1' * 29}2"], f"n{'1' * 30},n{'1' * 29}2"),
    ],
)
def test_folds_numbers_of_any_width(names: list[str], folded: str) -> None:
    assert fold(names) == folded
    assert set(expand(folded)) == set(names)


@pytest.mark.parametrize("seed", range(200))
def test_whatever_is_folded_unfolds_to_the_same_names(seed: int) -> None:
    draw = random.Random(seed)
    shapes = draw.choice([["a{}"], ["a{}b{}", "a{}"], ["{}.{}.{}", "x{}"], ["c{}r{}n{}", "{}z"]])
    names = {
        draw.choice(shapes).format(
            *("".join(draw.choices("019", k=draw.randrange(1, 4))) for _ in range(3))
        )
        for _ in range(draw.randrange(1, 40))
    }
    assert set(expand(fold(names))) == names
    assert fold(sorted(names)) == fold(sorted(names, reverse=True))
