"""The stacks as one HTML page that loads no other file: to send, to keep, to search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

from nodeready.reports import rank_groups
from nodeready.reports.html_page import HtmlPage
from nodeready.reports.lines import NO_LIMIT, node_set
from nodeready.reports.rank_groups import branches
from nodeready.reports.registry import PLAIN, Options
from nodeready.runs.stacks.document import Group, Rank, Stacks, Statement, fold_ranks

#: Groups that are unfolded at first, and maximum processes of each group.
_OPEN, _PROCESSES = 3, 1000
#: Maximum rows of the matrix, statements of a witness in a cell, and in the witness's own list.
_ROWS, _CELL, _STATEMENTS = 2000, 4, 200
#: Maximum branches at one place, and nested branches: browsers nest 512 elements.
_BRANCHES, _DEPTH = 200, 100
_LONG, _SET = 300, 60  # maximum characters of a name, and of a set of ranks or nodes in a row
#: The witnesses and the kinds of verdicts -> their names for a person.
_WITNESSES = {
    "logs": "log", "flight_recorder": "flight recorder", "nccl_ras": "NCCL RAS", "gpu": "GPU",
    "network": "network", "kernel": "kernel", "environment": "environment",
}  # fmt: skip
_KINDS = {
    "late": "a rank is late", "disagree": "ranks disagree", "gone": "a rank is gone",
    "quiet": "all wait, nothing moves", "moving": "all wait, bytes move",
    "slow-node": "a node is slow", "storage": "storage", "loader": "data loader",
    "environment": "a variable is wrong", "not-stuck": "not stuck", "unclear": "unclear",
    "straggler": "a rank is slow", "even": "no rank is slow",
}  # fmt: skip


def _folded(group: Group, limit: int = NO_LIMIT) -> str:
    return node_set(group.nodes, limit) if group.nodes else ""


@cache
def page() -> HtmlPage:
    return HtmlPage(
        "stacks_page",
        OPEN=_OPEN, PROCESSES=_PROCESSES, LONG=_LONG, SET=_SET, STATEMENTS=_STATEMENTS, CELL=_CELL,
        WITNESSES=_WITNESSES, KINDS=_KINDS, names=node_set, fold_ranks=fold_ranks, folded=_folded,
        place=rank_groups.place, ranks=rank_groups.ranks, who=rank_groups.members,
        word=rank_groups.word, call_texts=rank_groups.call_texts,
    )  # fmt: skip


_Row = dict[str, Any]  # a row of the page is a mapping: the template is its only reader


def _cards(stacks: Stacks) -> Iterator[_Row]:
    """The groups, numbered from 1."""
    processes_of = rank_groups.processes_by_group(stacks)
    largest, overtaken = rank_groups.largest(stacks), rank_groups.overtaken(stacks)
    for index, group in enumerate(stacks.groups):
        # All groups are compared with the largest. Others have moved on from an overtaken one's
        # last call.
        place = {"is_largest": group is largest, "is_overtaken": index in overtaken}
        processes = processes_of.get(index, ())
        yield {"number": index + 1, "group": group, "processes": processes, **place}


class _StatementIndex:
    """Finds the statements of a witness about a rank or its node."""

    def __init__(self, statements: Sequence[Statement]) -> None:
        self._ranks: dict[int, list[int]] = {}
        self._nodes: dict[str, list[int]] = {}
        # Equal statements share a number, so that the ranks of their nodes can share a row.
        numbers: dict[tuple[str, int, bool], int] = {}
        for index, statement in enumerate(statements):
            key = (statement.text, statement.weight, statement.against)
            number = numbers.setdefault(key, index)
            for rank in statement.ranks:
                self._ranks.setdefault(rank, []).append(number)
            # A statement about ranks also names their nodes, but is not about them.
            for node in () if statement.ranks else statement.nodes:
                self._nodes.setdefault(node, []).append(number)

    def find(self, rank: int | None, node: str) -> tuple[int, ...]:
        """The numbers of the statements about this rank or its node."""
        of_rank = self._ranks.get(rank, []) if rank is not None else []
        return tuple(sorted({*of_rank, *self._nodes.get(node, [])}))


class _GroupRank(NamedTuple):
    """A rank of a group. process: None: its process was not found"""

    group_index: int
    rank: int | None
    node: str
    state: str
    process: Rank | None


def _members(stacks: Stacks) -> Iterator[_GroupRank]:
    """Every rank, by group and then by rank."""
    processes_of = rank_groups.processes_by_group(stacks)
    for index, group in enumerate(stacks.groups):
        processes = list(processes_of.get(index, ()))
        processes.sort(key=lambda process: (process.rank is None, process.rank or 0))
        for process in processes:
            channel = process.wait_channel if process.wait_channel != "0" else ""
            state = f"{process.state} {channel}".strip()
            yield _GroupRank(index, process.rank, process.node, state, process)
        numbers = {process.rank for process in processes}
        for rank in group.ranks:
            if rank not in numbers:
                node = group.nodes[0] if len(group.nodes) == 1 else ""
                yield _GroupRank(index, rank, node, "", None)


def _cell(statements: Sequence[Statement]) -> _Row:
    """The statements of one witness about the ranks of a row, and the largest weight: -1 if all
    speak against a cause, None without a statement.
    """
    weights = (-1 if statement.against else statement.weight for statement in statements)
    return {"statements": statements, "weight": max(weights, default=None)}


def _matrix(stacks: Stacks) -> tuple[list[_Row], int]:
    """Rows by suspicion, one for neighbours with equal cells; the number of hidden rows."""
    statements = [witness.statements for witness in stacks.witnesses]
    indexes = [_StatementIndex(of_witness) for of_witness in statements]

    def row_key(member: _GroupRank) -> tuple[int, str, tuple[tuple[int, ...], ...]]:
        cells = tuple(index.find(member.rank, member.node) for index in indexes)
        return member.group_index, member.state, cells

    rows: list[_Row] = []
    hidden = 0
    for (group_index, state, cells), iterator in groupby(_members(stacks), row_key):
        if len(rows) == _ROWS:
            hidden += 1
            continue
        members, group = list(iterator), stacks.groups[group_index]
        nodes = dict.fromkeys(member.node for member in members if member.node)
        pairs = zip(statements, cells)
        rows.append({
            "order": len(rows) + 1,  # by suspicion
            "number": group_index + 1, "group": group, "state": state,
            "ranks": [member.rank for member in members if member.rank is not None],
            "processes": [member.process for member in members if member.process],
            "nodes": tuple(nodes) or group.nodes,
            "cells": [_cell([witness[number] for number in cell]) for witness, cell in pairs],
        })  # fmt: skip
    return rows, hidden


def _tree(stacks: Stacks) -> Iterator[_Row]:
    """The branches: whether the next rows are inside of a row, and how many rows end with it."""
    rows = list(branches(stacks, _BRANCHES, _DEPTH))
    depths = [*(row.depth for row in rows[1:]), 0]
    for row, after in zip(rows, depths):
        yield {"branch": row, "opens": after > row.depth, "closes": max(0, row.depth - after)}


def render(stacks: Stacks, options: Options = PLAIN) -> Iterator[str]:
    """The page. It folds without its script, and searches with it."""
    matrix, hidden_rows = _matrix(stacks)

    def suspect_group(ranks: Sequence[int]) -> int:
        """The number of the first group with one of these ranks; 0: no group."""
        groups = enumerate(stacks.groups, 1)
        return next((number for number, group in groups if {*ranks} & {*group.ranks}), 0)

    yield from page().render(
        stacks=stacks, title=rank_groups.headline(stacks), groups=list(_cards(stacks)),
        matrix=matrix, hidden_rows=hidden_rows,
        suspect_group=suspect_group,
        tree=list(_tree(stacks)) if any(group.frames for group in stacks.groups) else (),
        silent=[f"{gap.node}: {gap.reason}" for gap in rank_groups.silent(stacks)],
    )  # fmt: skip
