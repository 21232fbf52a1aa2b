"""A clock that stands still while anything runs, and jumps to the next timer when all wait.

Within `simulated_time()`, gevent's timers and time.monotonic() are of this clock: waiting takes no
time, and what happens when is the same on every machine.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gevent
import pytest


class _Timer:
    """In place of a timer of gevent's event loop."""

    pending = False

    def __init__(self, clock: Clock, after_s: float) -> None:
        self._clock, self._after_s = clock, max(0.0, after_s or 0.0)
        self.active = False

    def start(self, callback: Callable[..., object], *words: Any, **_: Any) -> None:
        self.active = True
        self._clock.add(self._after_s, self, callback, words)

    def stop(self) -> None:
        self.active = False

    close = stop

    def __enter__(self) -> _Timer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Clock:
    """The event loop of a hub, with timers of its own. now: in seconds"""

    def __init__(self, loop: Any) -> None:
        self._loop, self.now = loop, 1000.0
        self._timers: list[tuple[float, int, _Timer, Callable[..., object], Any]] = []
        self._order = itertools.count()
        self.idle = loop.idle()
        self.idle.start(self.jump)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def timer(self, after_s: float, *_: Any, **__: Any) -> _Timer:
        return _Timer(self, after_s)

    def add(
        self, after_s: float, timer: _Timer, callback: Callable[..., object], words: Any
    ) -> None:
        row = (self.now + after_s, next(self._order), timer, callback, words)
        heapq.heappush(self._timers, row)

    def jump(self) -> None:
        """Nothing runs: it is the time of the next timer."""
        while self._timers:
            at, _, timer, callback, words = heapq.heappop(self._timers)
            if timer.active:
                self.now = max(self.now, at)
                timer.stop()
                callback(*words)
                return
        # All wait for each other: gevent says so when nothing is left to wait for.
        self.idle.stop()


@contextmanager
def simulated_time() -> Iterator[Clock]:
    hub = gevent.get_hub()
    clock = Clock(hub.loop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "loop", clock)
        patch.setattr(time, "monotonic", lambda: clock.now)
        try:
            yield clock
        finally:
            clock.idle.stop()
            clock.idle.close()
    # Those that were killed end now, not with the interpreter.
    gevent.sleep(0)
