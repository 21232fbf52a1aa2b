"""What a fault is, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Fault:
    """Something that is wrong with a node.

    about:    what is wrong, in one line
    profiles: the kinds of node that can have it
    hardware: what its hardware has instead: arguments of the function that makes the profile's
    gone:     files that are missing; below /run, /tmp or /dev, which a restart makes anew
    start:    shell text that root runs on the node before its sshd
    programs: modules of nodeready.lab to run beside, each with its words after the node's pid
    needs:    programs that this machine must have
    """

    name: str
    about: str
    profiles: tuple[str, ...]
    hardware: Mapping[str, Any] = field(default_factory=dict)
    gone: tuple[str, ...] = ()
    start: str = ""
    programs: tuple[tuple[str, ...], ...] = ()
    needs: tuple[str, ...] = ()
