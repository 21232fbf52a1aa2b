"""The merged tree: what is common stands there once, with all who pass."""

from __future__ import annotations

from nodeready.triage.stacks import group as grouping
from nodeready.triage.stacks.document import Tree, tree
from tests.builders.traces import LOAD, REDUCE, process, trace


def made(*processes) -> Tree:
    return tree(grouping.group([trace("a", *processes)], {}))


def path(node: Tree) -> list[tuple[str, int, tuple[int, ...]]]:
    """Down the first children: function, processes, ranks."""
    rows = []
    while node.children:
        node = node.children[0]
        rows.append((node.frame.function, node.processes, node.ranks))
    return rows


def test_what_is_common_is_there_once():
    root = made(*(process(rank, REDUCE) for rank in (0, 1, 2)), process(3, LOAD))
    everybody, most = (0, 1, 2, 3), (0, 1, 2)
    assert (root.frame, root.processes, root.ranks) == (None, 4, everybody)
    assert path(root) == [
        ("<module>", 4, everybody),
        ("train", 4, everybody),
        ("step", 4, everybody),
        ("all_reduce", 3, most),
    ]
    step = root.children[0].children[0].children[0]
    assert [(child.frame.function, child.ranks) for child in step.children] == [
        ("all_reduce", most),
        ("_try_get_data", (3,)),
    ]
    assert step.groups == (0, 1)
    assert step.frame.line == 40


def test_lines_that_differ_are_none_and_one_stack_can_end_where_another_goes_on():
    root = made(process(0, "main x.py 1 > step x.py 2"), process(1, "main x.py 9"))
    (main,) = root.children
    assert (main.frame.line, main.processes, main.groups) == (0, 2, (0, 1))
    assert [child.ranks for child in main.children] == [(0,)]


def test_who_has_no_stack_is_not_in_it():
    root = made(process(0, REDUCE), process(1, None))
    assert (root.processes, root.ranks) == (1, (0,))
    empty = made(process(1, None))
    assert (empty.processes, empty.children) == (0, ())


def test_a_stack_can_be_deeper_than_python_recurses():
    deep = " > ".join(f"f x.py {at + 1}" for at in range(5000))
    assert len(path(made(process(0, deep)))) == 5000
