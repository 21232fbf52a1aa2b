"""The observations of the proofs of one node: plain data from the node, for the checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from nodeready.core import wire
from nodeready.core.base import Unknown
from nodeready.subjects.proof.core_facts import ProvedCore
from nodeready.subjects.proof.debugger_facts import Attach, Control, Tracers
from nodeready.subjects.proof.mesh_facts import Mesh
from nodeready.subjects.proof.peer_facts import Peers, Reach
from nodeready.subjects.proof.session_facts import Logins, Resources, SessionLimits, User


@dataclass(frozen=True)
class SessionProof:
    """The observations of a further session beside the first one."""

    error: wire.Line  # why the session proves nothing, one line; "": it does
    closed: bool = False  # the login was begun, and the node refused or ended it
    ended: bool = False  # the user's shell was started, and ended before its command
    limits: SessionLimits | None = None
    attach: Attach | None = None  # only py-spy's blocking dump
    tracers: Tracers | None = None
    # without a backtrace; None also where two cores at once would have one name
    core: ProvedCore | None = None


@dataclass(frozen=True)
class ProvedCollective:
    """The outcome of a collective over all nodes (`nodeready smoke`) for one node."""

    nodes: int  # the number of nodes in the test; 1: this node alone
    engine: str = ""  # the program of the collective, ``torch 2.13.0 over nccl``; "": none
    proves: str = ""  # the meaning of a pass
    # the evidence against this node, a sentence for each finding; (): no evidence
    against: tuple[str, ...] = ()
    untested: str = ""  # why the node was not tested; "": it was
    lacking: bool = False  # the node was not tested because it has no engine
    warnings: tuple[str, ...] = ()  # counters that got worse on the node meanwhile, and slow links
    network: str = ""  # that NCCL chose on the node, ``IB, 8 ports, GPUDirect RDMA``; "": unknown


# --- The history of a node, which the memory on the control machine has.


@dataclass(frozen=True)
class ProvedHistory:
    """The earlier failures of a node, beside those of its peers."""

    # the node itself, or a GPU in it, that failed far more often; a line each
    lemons: tuple[str, ...] = ()


# --- All proofs of one node, and the reader of its answer.

#: The reason of a proof without an answer.
UNFINISHED = "did not finish in time"

#: The proofs that run in the session of the job's user, in the order of their start -> the class
#: of the observation: a field of `Proved`. agent/proofs/program.py has the function of each.
SESSION: dict[str, type[Any]] = {
    "limits": SessionLimits,
    "attach": Attach,
    "tracers": Tracers,
    "core": ProvedCore,
    "resources": Resources,
    "peers": Peers,
}
#: The proofs that run between the nodes.
MESH, COLLECTIVE = "mesh", "collective"
#: What the memory proves: nothing runs.
HISTORY = "history"
#: The further sessions, opened when one of `IN_EACH_SESSION` is requested.
FURTHER_SESSIONS: dict[str, type[Any]] = {"ssh": SessionProof, "step": SessionProof}
#: The proofs that each session repeats.
IN_EACH_SESSION = ("limits", "attach", "tracers", "core")
_KINDS = {
    "user": User, "control": Control, "logins": Logins, **SESSION, **FURTHER_SESSIONS,
    "shell": SessionProof, "login": SessionProof,
}  # fmt: skip


@dataclass(frozen=True)
class ProofConfig:
    """The configuration of the program of the proofs."""

    nonce: str  # random word with which each of its lines begins
    # ``nodeready:RUN``, in the arguments of every process that it starts and leaves running for a
    # while, so that an interrupt finds it
    tag: str
    user: str = ""  # the job's user; "": the login's user
    proofs: tuple[str, ...] = tuple(SESSION)  # which of SESSION
    # the nodes to which ssh and pdsh are tried, by the names of the inventory
    peers: tuple[str, ...] = ()
    limit_s: int = 50  # seconds after which it must have ended
    py_spy: str = "/usr/local/bin/py-spy"  # the path of py-spy; "": where the user's PATH finds it
    # this is a further session on the machine of this name (`session.identity`), with quick proofs
    # only; "": it is the first session
    machine: str = ""
    step: bool = False  # a step of Slurm may be asked for


@dataclass(frozen=True)
class Proved:
    """The observations of one node's proofs. None: the proof was not requested."""

    user: User | Unknown  # the user in whose session the proofs ran
    limits: SessionLimits | Unknown | None = None
    attach: Attach | Unknown | None = None
    # root's attempt to attach; None also where the login was not root's
    control: Control | Unknown | None = None
    logins: Logins | Unknown | None = None  # how this node opens sessions
    # a session by ssh, from the node to itself; None also where the first session is ssh's
    ssh: SessionProof | Unknown | None = None
    # the user's shell, started by root as sshd starts it; None also where ``ssh`` shows it
    shell: SessionProof | Unknown | None = None
    # a login shell of the user, in a session that ssh opened; None also elsewhere
    login: SessionProof | Unknown | None = None
    # a session by a step of Slurm; None also where slurmd's own limits suffice
    step: SessionProof | Unknown | None = None
    tracers: Tracers | Unknown | None = None
    core: ProvedCore | Unknown | None = None
    resources: Resources | Unknown | None = None
    # ssh and pdsh from this node to its peers, as this node saw them
    peers: Peers | Unknown | None = None
    # ssh and pdsh between the nodes, as all nodes together saw them
    reach: Reach | Unknown | None = None
    # the job's ports between the nodes, as all nodes together saw them
    mesh: Mesh | Unknown | None = None
    # the outcome of a collective over all nodes for this node
    collective: ProvedCollective | Unknown | None = None
    # its earlier failures; None also where there is no memory of earlier looks
    history: ProvedHistory | Unknown | None = None

    @property
    def user_name(self) -> str:
        """The name of the session's user in a result."""
        return self.user.name if isinstance(self.user, User) else "the user"


class ProofRequest(Protocol):
    """The part of a request that a reader of the answer has to know."""

    @property
    def nonce(self) -> str: ...
    @property
    def proofs(self) -> tuple[str, ...]: ...


def all_unknown(reason: str, request: ProofRequest) -> Proved:
    """The proofs of a node that gave no answer."""
    unknown: Any = Unknown(reason)
    return Proved(unknown, **dict.fromkeys(request.proofs, unknown))


def read(text: str, request: ProofRequest) -> Proved:
    """The proofs in a node's answer. Never raises: a proof that cannot be read is Unknown."""
    if f"{request.nonce} {wire.NO_PYTHON}" in text:
        return all_unknown(wire.PYTHON_MISSING, request)
    proofs: dict[str, Any] = {}
    try:
        for name, data in wire.lines(text, request.nonce):
            if name in _KINDS and name not in proofs:
                proofs[name] = _decode(name, data)
    except wire.DecodeError as problem:
        return all_unknown(problem.reason, request)
    user = proofs.get("user", Unknown(UNFINISHED))
    if isinstance(user, User) and user.error:
        # Without a session there is nothing to prove: the reason is given once.
        return Proved(user, logins=proofs.get("logins"))
    for name in request.proofs:
        proofs.setdefault(name, Unknown(UNFINISHED))
    return Proved(**{**proofs, "user": user})


def _decode(name: str, data: Any) -> Any:
    if isinstance(data, dict) and set(data) == {"broken"}:
        return Unknown("ended with an error", str(data["broken"])[:300])
    try:
        return wire.decode(_KINDS[name], data)
    except wire.DecodeError as problem:
        return Unknown(problem.reason, problem.evidence)
