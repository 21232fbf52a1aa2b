"""The stacks of all nodes, every different one kept once and known by a number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nodeready.stacks import Frame

#: Native frames without a symbol, and offsets into one: address randomisation makes them differ.
_ADDRESS = re.compile(r"\+?\b0x[0-9a-fA-F]+\b")


class Places:
    """Numbers for stacks, the same for the same stack of any node.

    A stack's number tells its lines apart, a path's number does not: ranks that stand in the same
    functions are together, whatever line they are at.
    """

    def __init__(self) -> None:
        self._frames: dict[tuple[str, str, int], int] = {}
        self._seen: list[Frame] = []
        self._function_of: list[int] = []
        self._functions: dict[tuple[str, str], int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._all: list[tuple[int, ...]] = []
        self._paths: dict[tuple[int, ...], int] = {}
        #: Stack -> its path.
        self.path_of: list[int] = []

    def _frame(self, frame: tuple[str, str, int]) -> int:
        number = self._frames.get(frame)
        if number is None:
            function, file, line = frame
            if "0x" in function:
                function = _ADDRESS.sub("", function).strip() or "?"
            number = self._frames[frame] = len(self._seen)
            self._seen.append(Frame(function, file, line))
            place = (function, file)
            self._function_of.append(self._functions.setdefault(place, len(self._functions)))
        return number

    def _stack(self, frames: tuple[int, ...]) -> int:
        number = self._stacks.get(frames)
        if number is None:
            number = self._stacks[frames] = len(self._all)
            self._all.append(frames)
            path = tuple(self._function_of[frame] for frame in frames)
            self.path_of.append(self._paths.setdefault(path, len(self._paths)))
        return number

    def numbers(self, trace: Mapping[str, Any]) -> list[int]:
        """The number of each of the trace's stacks."""
        frame, stack = self._frame, self._stack
        own = [frame(tuple(one)) for one in trace["frames"]]
        return [stack(tuple([own[index] for index in one])) for one in trace["stacks"]]

    def path(self, stack: int) -> tuple[int, ...]:
        """The functions of a stack by number, root to leaf."""
        return tuple(self._function_of[frame] for frame in self._all[stack])

    def same(self, one: int, other: int) -> bool:
        """Whether somebody who was at both has stayed: only the line of the last call may differ.

        A loop that waits is at different lines of its function; a program that goes on comes to
        different calls.
        """
        if one == other:
            return True
        if self.path_of[one] != self.path_of[other]:
            return False
        return self._all[one][:-1] == self._all[other][:-1]

    def frames(self, stacks: Iterable[int]) -> tuple[Frame, ...]:
        """The frames of stacks with the same path; the line is 0 where they differ."""
        rows: Sequence[Sequence[Frame]] = [
            [self._seen[frame] for frame in self._all[stack]] for stack in stacks
        ]
        return tuple(
            frame if all(other.line == frame.line for other in rest) else frame._replace(line=0)
            for frame, *rest in zip(*rows, strict=True)
        )
