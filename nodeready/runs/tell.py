"""What a run tells its user, and asks: lines, progress, sudo's password, a confirmation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Done(Protocol):
    """Counts a node as done. failed: it gave no answer"""

    def __call__(self, name: str, failed: bool = False) -> None: ...


class Tell:
    """The user of a run. This class serves a user without a terminal: it cannot prompt.

    quiet: the user wants to read only problems
    """

    quiet = False

    def say(self, text: str) -> None:
        """Tell one line."""

    def note(self, text: str) -> None:
        """Tell one line that a quiet user does not want."""
        if not self.quiet:
            self.say(text)

    def say_partial(self, missing: Iterable[str]) -> None:
        """After an interrupt, tell which nodes are missing in the results."""
        from nodeready.fleet.inventory.nodeset import folded

        names = [*missing]
        without = f"; not {folded(names)}" if names else ""
        self.say(f"interrupted: the results are partial{without}")

    @contextmanager
    def progress(self, activity: str, names: Iterable[str]) -> Iterator[Done]:
        """Count these nodes while they finish."""
        yield lambda name, failed=False: None

    def without_progress(self) -> Tell:
        """The same user, who wants no progress between other lines."""
        return self

    def ask_password(self, prompt: str) -> str | None:
        """A password of the user; None: no prompt is possible."""
        return None
