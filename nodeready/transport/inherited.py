"""Ends of sockets and pipes that a fork of this process must close.

The peer notices the parent's end only when no child holds the parent's descriptor.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar
from weakref import WeakSet


class InheritedEnd(Protocol):
    """An end that this process holds. forget: closes it in this process only"""

    def forget(self) -> None: ...


EndT = TypeVar("EndT", bound=InheritedEnd)
_OWNED: WeakSet[Any] = WeakSet()


def register_for_fork(end: EndT) -> EndT:
    """Have a fork of this process close this end."""
    _OWNED.add(end)
    return end


def close_inherited() -> None:
    """In a fork: close the ends of its parent."""
    for end in list(_OWNED):
        end.forget()
    _OWNED.clear()
