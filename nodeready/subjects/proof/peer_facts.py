"""Logins by ssh and pdsh between nodes, as one node or all nodes together saw them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nodeready.subjects import wire


@dataclass(frozen=True)
class SshTry:
    """One login by ssh.

    name:      the peer's name in the inventory
    rc:        exit status of ssh: 255 for an error of ssh itself; None: ended by its time limit
    answer:    the last line of the output: the peer's host name after a good login
    messages:  the end of ssh's messages; "" when ssh exited with 0
    overrides: options of the user's own configuration (``user ada``) with which the login fails or
               reaches another host, and without which it works
    forced:    ``FILE:LINE`` of the peer's authorized key whose command= replaces the command; "":
               none
    """

    JSON_KEYS: ClassVar = {"messages": "said", "overrides": "own"}

    name: wire.Name
    rc: int | None
    answer: wire.Line
    messages: str
    overrides: tuple[wire.Line, ...] = ()
    forced: wire.Line = ""


@dataclass(frozen=True)
class PdshAnswer:
    """One line of pdsh's output, ``LABEL: text``."""

    label: wire.Name
    text: wire.Line


@dataclass(frozen=True)
class PdshRun:
    """One run of pdsh over the peers that ssh reaches; where ssh fails, pdsh fails as well.

    targets:  the names that pdsh was given
    answers:  the lines of its output
    rc:       pdsh's exit status, which is 0 also for a refused connection; None: ended by its time
              limit
    messages: the end of pdsh's messages
    """

    JSON_KEYS: ClassVar = {"targets": "asked", "messages": "said"}

    targets: tuple[wire.Name, ...]
    answers: tuple[PdshAnswer, ...]
    rc: int | None
    messages: str


@dataclass(frozen=True)
class RcmdDefault:
    """The default remote command of pdsh in one kind of shell.

    kind:     of shell: ``login`` or ``interactive``
    rcmd:     as ``pdsh -q`` prints it; "": it prints none
    value:    PDSH_RCMD_TYPE; None: not set
    set_by:   ``FILE:LINE`` that sets the variable when the shell starts; "": none, or unknown
    works:    it is ssh, or pdsh got an answer with it
    messages: the end of pdsh's messages when there is no ``rcmd``
    """

    JSON_KEYS: ClassVar = {"messages": "said"}

    kind: wire.Name
    rcmd: wire.Name
    value: wire.Line | None
    set_by: wire.Line
    works: bool
    messages: wire.Line


@dataclass(frozen=True)
class Peers:
    """ssh and pdsh from this node to its peers.

    host:           this node's own host name
    ssh_installed:  the user's PATH has ssh
    ssh:            the logins, in the order of the names
    pdsh_installed: the user's PATH has pdsh
    pdsh:           None: not tried, for want of a peer or of pdsh
    defaults:       pdsh's remote command in the user's shells; (): not asked
    pdshrc:         why a shell that reads ~/.pdshrc runs no later command; "": it does, or
                    there is no such file
    """

    host: wire.Name
    ssh_installed: bool
    ssh: tuple[SshTry, ...]
    pdsh_installed: bool
    pdsh: PdshRun | None
    defaults: tuple[RcmdDefault, ...] = ()
    pdshrc: wire.Line = ""


@dataclass(frozen=True)
class Trouble:
    """One fault of a node's logins, reported once for all attempts that show it.

    kind:  ``target``: peers cannot log in to the node; ``source``: the node cannot log in to
           peers; ``both``; ``pair``: the node cannot log in to one peer, and neither has other
           trouble; ``namesake``: other nodes have the same host name
    peers: the peers with which the logins fail
    tried: number of peers with which logins were tried, in that direction
    cause: a key of `nodeready.subjects.ssh_client.login_failures.CAUSES`
    message: ssh's message with the cause, or the host name that answered
    back:  whether the opposite direction works; None: it was not tried
    """

    JSON_KEYS: ClassVar = {"message": "said"}

    kind: str
    peers: tuple[str, ...]
    tried: int
    cause: str
    message: str = ""
    back: bool | None = None


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
    """The outcome of the logins between a node and its peers, by ssh and by pdsh.

    to:           number of peers to which this node tried to log in
    by:           number of peers that tried to log in to this node
    ssh:          the faults of the logins that this node causes
    excused:      peers that this node does not reach by a fault of the peers
    pdsh_targets: number of peers that pdsh was given: those that ssh reaches
    distinct:     number of different answers that pdsh got
    missing:      the peers without an answer
    same:         peers with the same answer, for another reason than their host names
    pdsh_said:    pdsh's message if it got no answer at all, one line
    pdsh_by:      peers whose pdsh gets another host name than this node's from this node
    """

    JSON_KEYS: ClassVar = {"pdsh_targets": "asked"}

    to: int = 0
    by: int = 0
    ssh: tuple[Trouble, ...] = ()
    excused: tuple[str, ...] = ()
    pdsh_targets: int = 0
    distinct: int = 0
    missing: tuple[Missing, ...] = ()
    same: tuple[Same, ...] = ()
    pdsh_said: str = ""
    pdsh_by: tuple[str, ...] = ()
