"""PyTorch's flight recorder: which collectives a rank has called, from the dump that it wrote."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessGroup:
    """A process group as the rank knows it.

    name:  number of the group (``0``); desc: ``default_pg``
    ranks: the global ranks in it; () where the dump does not tell
    enqueued, started, completed: number of the last collective; None: not told
    """

    name: str
    desc: str
    ranks: tuple[int, ...]
    enqueued: int | None
    started: int | None
    completed: int | None


@dataclass(frozen=True)
class Entry:
    """One call of a collective, or of a send or receive, behind the last that was completed.

    group:      name of the process group
    sequence:   its number in the group (`collective_seq_id`, `p2p_seq_id`)
    is_p2p:     a send or a receive
    operation:  ``all_reduce``, ``send 1->2``
    state:      ``scheduled``, ``started``, ``completed``
    sizes, types: of the inputs and the outputs: ``[[1024], [1024]]``, ``[Float, Float]`` as text
    site:       the innermost frame of the user's own code: ``train.py:88 step``; "": not told
    """

    group: str
    sequence: int
    is_p2p: bool
    operation: str
    state: str
    sizes: str
    types: str
    site: str


@dataclass(frozen=True)
class Recording:
    """What one rank's dump says.

    absent:  why there is none, one line; "": there is one
    path:    its file
    age_s:   whole seconds since it was written
    version: of the dump's form
    partial: it was cut off, or is the recorder's without entries
    groups:  all process groups of the rank
    entries: what is behind the last completed collective of each group, the oldest first
    """

    absent: str = ""
    path: str = ""
    age_s: int = 0
    version: str = ""
    partial: bool = False
    groups: tuple[ProcessGroup, ...] = ()
    entries: tuple[Entry, ...] = ()
