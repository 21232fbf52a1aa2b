"""Ends of sockets and pipes that a fork of this process must close.

The peer notices the parent's end only when no child holds the parent's descriptor.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar
from weakref import WeakSet


class InheritedEnd(Protocol):
    """An end that this process holds. forget: closes it here, without a word to the peer."""

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
