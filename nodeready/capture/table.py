"""Frames and stacks of a node, each different one once."""

from __future__ import annotations

from collections.abc import Sequence

from nodeready.capture.py_spy import Frame


class Table:
    """Gives every frame and every stack a number, the same for the same."""

    def __init__(self) -> None:
        self._frames: dict[Frame, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        #: Frames in all stacks together.
        self.size = 0

    def add(self, frames: Sequence[Frame]) -> int:
        """The number of a stack, root to leaf."""
        key = tuple(self._frames.setdefault(frame, len(self._frames)) for frame in frames)
        if key not in self._stacks:
            self.size += len(key)
        return self._stacks.setdefault(key, len(self._stacks))

    @property
    def frames(self) -> list[Frame]:
        """All frames, by their numbers."""
        return list(self._frames)

    @property
    def stacks(self) -> list[tuple[int, ...]]:
        """All stacks, by their numbers."""
        return list(self._stacks)
