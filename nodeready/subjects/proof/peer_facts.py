"""Logins and connections between nodes, as one node or all nodes together saw them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nodeready.core import wire

# --- Logins by ssh and pdsh.


@dataclass(frozen=True)
class SshTry:
    """One login by ssh."""

    JSON_KEYS: ClassVar = {"messages": "said", "overrides": "own"}

    name: wire.Name  # the peer's name in the inventory
    # exit status of ssh: 255 for an error of ssh itself; None: ended by its time limit
    rc: int | None
    answer: wire.Line  # the last line of the output: the peer's host name after a good login
    messages: str  # the end of ssh's messages; "" when ssh exited with 0
    # options of the user's own configuration (``user ada``) with which the login fails or reaches
    # another host, and without which it works
    overrides: tuple[wire.Line, ...] = ()
    # ``FILE:LINE`` of the peer's authorized key whose command= replaces the command; "": none
    forced: wire.Line = ""


@dataclass(frozen=True)
class PdshAnswer:
    """One line of pdsh's output, ``LABEL: text``."""

    label: wire.Name
    text: wire.Line


@dataclass(frozen=True)
class PdshRun:
    """One run of pdsh over the peers that ssh reaches; where ssh fails, pdsh fails as well."""

    JSON_KEYS: ClassVar = {"targets": "asked", "messages": "said"}

    targets: tuple[wire.Name, ...]  # the names that pdsh was given
    answers: tuple[PdshAnswer, ...]  # the lines of its output
    # pdsh's exit status, which is 0 also for a refused connection; None: ended by its time limit
    rc: int | None
    messages: str  # the end of pdsh's messages


@dataclass(frozen=True)
class RcmdDefault:
    """The default remote command of pdsh in one kind of shell."""

    JSON_KEYS: ClassVar = {"messages": "said"}

    kind: wire.Name  # of shell: ``login`` or ``interactive``
    rcmd: wire.Name  # as ``pdsh -q`` prints it; "": it prints none
    value: wire.Line | None  # PDSH_RCMD_TYPE; None: not set
    # ``FILE:LINE`` that sets the variable when the shell starts; "": none, or unknown
    set_by: wire.Line
    works: bool  # it is ssh, or pdsh got an answer with it
    messages: wire.Line  # the end of pdsh's messages when there is no ``rcmd``


@dataclass(frozen=True)
class Peers:
    """ssh and pdsh from this node to its peers."""

    host: wire.Name  # this node's own host name
    ssh_installed: bool  # the user's PATH has ssh
    ssh: tuple[SshTry, ...]  # the logins, in the order of the names
    pdsh_installed: bool  # the user's PATH has pdsh
    pdsh: PdshRun | None  # None: not tried, for want of a peer or of pdsh
    # pdsh's remote command in the user's shells; (): not asked
    defaults: tuple[RcmdDefault, ...] = ()
    # why a shell that reads ~/.pdshrc runs no later command; "": it does, or there is no such file
    pdshrc: wire.Line = ""


@dataclass(frozen=True)
class Trouble:
    """One fault of a node's logins, reported once for all attempts that show it."""

    JSON_KEYS: ClassVar = {"message": "said"}

    # ``target``: peers cannot log in to the node; ``source``: the node cannot log in to peers;
    # ``both``; ``pair``: the node cannot log in to one peer, and neither has other trouble;
    # ``namesake``: other nodes have the same host name
    kind: str
    peers: tuple[str, ...]  # the peers with which the logins fail
    tried: int  # number of peers with which logins were tried, in that direction
    cause: str  # a key of `nodeready.subjects.ssh_client.login_failures.CAUSES`
    message: str = ""  # ssh's message with the cause, or the host name that answered
    back: bool | None = None  # whether the opposite direction works; None: it was not tried


@dataclass(frozen=True)
class Missing:
    """A peer that ssh reaches and pdsh does not. message: pdsh's message about it, or ""."""

    JSON_KEYS: ClassVar = {"message": "said"}

    name: str
    message: str


@dataclass(frozen=True)
class Same:
    """Peers from which pdsh got the same answer."""

    answer: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Reach:
    """The outcome of the logins between a node and its peers, by ssh and by pdsh."""

    JSON_KEYS: ClassVar = {"pdsh_targets": "asked"}

    to: int = 0  # number of peers to which this node tried to log in
    by: int = 0  # number of peers that tried to log in to this node
    ssh: tuple[Trouble, ...] = ()  # the faults of the logins that this node causes
    excused: tuple[str, ...] = ()  # peers that this node does not reach by a fault of the peers
    pdsh_targets: int = 0  # number of peers that pdsh was given: those that ssh reaches
    distinct: int = 0  # number of different answers that pdsh got
    missing: tuple[Missing, ...] = ()  # the peers without an answer
    # peers with the same answer, for another reason than their host names
    same: tuple[Same, ...] = ()
    pdsh_said: str = ""  # pdsh's message if it got no answer at all, one line
    # peers whose pdsh gets another host name than this node's from this node
    pdsh_by: tuple[str, ...] = ()


# --- Connections on the job's ports.


@dataclass(frozen=True)
class Busy:
    """A port on which the proof could not listen, and the kernel's error."""

    port: wire.Port
    error: wire.Line


@dataclass(frozen=True)
class Blocked:
    """One fault of a node's connections, reported once for all connections that show it."""

    # ``target``: peers do not reach the node; ``source``: the node does not reach peers; ``both``;
    # ``pair``: the node does not reach one peer, and neither has other trouble
    kind: str
    # the ports that fail; (): not tried, because the name resolves to a wrong address
    ports: tuple[int, ...]
    peers: tuple[str, ...]  # the peers with which the connections fail
    tried: int  # with how many peers connections were tried, in that direction
    cause: str  # one line
    back: bool | None  # whether the opposite direction works; None: it was not tried


@dataclass(frozen=True)
class Mesh:
    """The outcome of the connections between a node and its peers on the job's ports."""

    nodes: int  # how many nodes took part; 1: this one alone
    first: int  # the range of ports
    last: int  # likewise
    # the ports of the range on which the proof listened here for a while
    listening: tuple[int, ...]
    busy: tuple[Busy, ...]  # the ports on which it could not listen
    to: int  # how many peers this node tried to reach
    by: int  # how many peers tried to reach this node
    reached: int  # how many peers this node reached, on all ports that were tried
    reached_by: int  # how many peers reached this node, on all ports that were tried
    blocked: tuple[Blocked, ...]  # the faults that this node causes
    # of the handshakes of this node's own connections; None: there was none
    median_ms: float | None
    worst_ms: float | None  # the slowest of these handshakes
    worst_peer: str  # the peer of the slowest handshake
    # the number of connections to this node's listeners, if most were foreign and a peer failed to
    # connect; else 0
    crowd: int = 0
    # why the node's host name does not resolve to the node's address on the node; "": it does
    own_name: str = ""
    names: tuple[Blocked, ...] = ()  # the faults of host names between this node and its peers
