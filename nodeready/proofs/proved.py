"""All that the proofs of one node saw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from nodeready.probes.base import ProbeError, Unknown
from nodeready.proofs import wire
from nodeready.proofs.mesh_seen import Mesh
from nodeready.proofs.reach import Reach
from nodeready.proofs.seen import Attach, Control, Core, Peers, SessionLimits, Tracers, User

#: The reason of a proof of which nothing came.
UNFINISHED = "did not finish in time"

_KINDS: dict[str, Any] = {
    "user": User,
    "control": Control,
    "limits": SessionLimits,
    "attach": Attach,
    "tracers": Tracers,
    "core": Core,
    "peers": Peers,
}


@dataclass(frozen=True)
class Proved:
    """What the proofs of one node saw. A field is None when nobody asked for it.

    user:    in whose session they ran
    control: what root's attempt to attach showed; None also where we were not root
    peers:   how ssh and pdsh from this node to others went, as this node saw it
    reach:   the same, as all nodes together saw it: what is wrong with this node
    mesh:    the job's ports between the nodes, as all nodes together saw them
    """

    user: User | Unknown
    limits: SessionLimits | Unknown | None = None
    attach: Attach | Unknown | None = None
    control: Control | Unknown | None = None
    tracers: Tracers | Unknown | None = None
    core: Core | Unknown | None = None
    peers: Peers | Unknown | None = None
    reach: Reach | Unknown | None = None
    mesh: Mesh | Unknown | None = None


class Asked(Protocol):
    """What of the request a reader of the answer has to know: its nonce, and what was wanted."""

    @property
    def nonce(self) -> str: ...
    @property
    def wanted(self) -> tuple[str, ...]: ...


def nothing(reason: str, asked: Asked) -> Proved:
    """The proofs of a node that gave no answer."""
    unknown: Any = Unknown(reason)
    return Proved(unknown, **dict.fromkeys(asked.wanted, unknown))


def read(text: str, asked: Asked) -> Proved:
    """The proofs that a node's answer holds. Never raises: what cannot be read is Unknown."""
    if f"{asked.nonce} {wire.NO_PYTHON}" in text:
        return nothing(f"{wire.NO_PYTHON} on the node: the proofs need it", asked)
    found: dict[str, Any] = {}
    for name, data in wire.lines(text, asked.nonce):
        if name not in _KINDS or name in found:
            continue
        try:
            found[name] = _one(name, data)
        except ProbeError as problem:
            found[name] = Unknown(problem.reason, problem.evidence)
    user = found.get("user", Unknown(UNFINISHED))
    if isinstance(user, User) and user.error:
        # One reason, told once: without a session there is nothing to prove.
        return Proved(user)
    for name in asked.wanted:
        found.setdefault(name, Unknown(UNFINISHED))
    return Proved(**{**found, "user": user})


def _one(name: str, data: Any) -> Any:
    if isinstance(data, dict) and set(data) == {"broken"}:
        return Unknown("ended with an error", str(data["broken"])[:300])
    return wire.decode(_KINDS[name], data)
