"""Ends of sockets and pipes that a fork of this process must close.

A child that kept one would keep the other end from noticing the end of the parent.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar
from weakref import WeakSet


class InheritedEnd(Protocol):
    """An end of ours. forget: closes it here, and leaves what is at the other end alone."""

    def forget(self) -> None: ...


EndT = TypeVar("EndT", bound=InheritedEnd)


_OWNED: WeakSet[Any] = WeakSet()


def register_for_fork(end: EndT) -> EndT:
    """This end is this process's alone."""
    _OWNED.add(end)
    return end


def close_inherited() -> None:
    """In a copy of the process that had these ends: close them."""
    for end in list(_OWNED):
        end.forget()
    _OWNED.clear()
