"""Hostfiles: those of a scheduler or a user, and the ready nodes in forms for launchers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from nodeready.core.files import only_regular
from nodeready.fleet.inventory import trust
from nodeready.fleet.inventory.nodeset import NodeSetError, expand_one, fold, too_many

#: A hostfile of `nodeset.MAX_NODES` names of full length is 17 MB: more is another kind of file.
MAX_BYTES = 32 * 1024 * 1024
MAX_SLOTS = 65_536  # more slots than any node has hardware threads: a typing error
#: Where DeepSpeed looks (deepspeed --hostfile), after the current directory.
DEFAULT_FILES = ("./hostfile", "/job/hostfile")
_SLOTS = ("slots", "cpus", "cpu", "count")
# Settings of the launchers that choose no nodes.
_IGNORED = ("max_slots", "max-slots", "ifname", "binding")
Slots = dict[str, int | None]  # host -> its slots; None: the file gives none
_SETTING = re.compile(r"([A-Za-z][A-Za-z_-]*)=(\S+)")


def _refused(text: str) -> Exception:
    """pyinfra's InventoryError: `nodeready ready --help` names the forms and needs no pyinfra."""
    from pyinfra.api.exceptions import InventoryError

    return InventoryError(text)


def _parts(line: str) -> tuple[str, list[str]]:
    """The host (or node set) and its settings; ``host:8`` becomes ``slots=8``."""
    head, *settings = re.sub(r"\s*=\s*", "=", line).split()
    match = re.fullmatch(r"(\[[^\[\]]*\]|[^:]*):([0-9]+)", head)
    if match:
        return match[1], [f"slots={match[2]}", *settings]
    return head, settings


def _slots(settings: list[str]) -> int | None:
    """The slots that ``settings`` give, None when they give none. Raises ValueError."""
    slots = None
    for setting in settings:
        match = _SETTING.fullmatch(setting)
        if not match or match[1] not in (*_SLOTS, *_IGNORED):
            words = f"{setting[:60]!a} is not understood"
            raise ValueError(f"{words}; write HOST slots=N, HOST:N or HOST")
        if match[1] in _SLOTS:
            if not re.fullmatch(r"[0-9]{1,9}", match[2]) or int(match[2]) > MAX_SLOTS:
                raise ValueError(f"{setting[:60]!a}: slots are a number up to {MAX_SLOTS}")
            slots = int(match[2])
    return slots


def parse(text: str, source: str) -> Slots:
    """The hosts of a hostfile in its order, each with its slots; None where none were given.

    source: the file's name, for the error text
    Raises InventoryError, one line: the file, the line's number, and the line.
    """
    hosts: Slots = {}
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.split("#", 1)[0].strip()
        if not line:
            continue
        try:
            name, settings = _parts(line)
            slots = _slots(settings)
            names = expand_one(name)
        except (NodeSetError, ValueError) as error:
            raise _refused(f"{source}:{number}: {error} (in {line[:80]!a})") from None
        for host in names:
            if host in hosts:
                before = hosts[host]
                hosts[host] = (1 if before is None else before) + (1 if slots is None else slots)
            else:
                hosts[host] = slots
        if reason := too_many(len(hosts), source):
            raise _refused(reason)
    if not hosts:
        raise _refused(f"{source} names no host: one host per line, as HOST or HOST slots=8")
    return hosts


def read(path: str | Path, trusted: bool = False, *, remedy: str = trust.USE_OPTION) -> Slots:
    """`parse` of the file ``path``. Raises InventoryError, also when it cannot be read."""
    return parse(content(path, trusted, remedy=remedy), str(path))


def content(path: str | Path, trusted: bool = False, *, remedy: str = trust.USE_OPTION) -> str:
    """The text of a file that names hosts. Raises InventoryError.

    trusted: read it although others could have written it; see `nodeready.fleet.inventory.trust`
    remedy:  as for `trust.distrust`
    """
    reason = "" if trusted else trust.distrust(path, remedy=remedy)
    if reason:
        raise _refused(reason)
    try:
        with open(path, "rb", opener=only_regular) as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _refused(f"cannot read the hostfile {path}: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise _refused(f"{path} is no hostfile: it is larger than {MAX_BYTES} bytes")
    return data.decode("utf-8-sig", "backslashreplace")


def find(environ: Mapping[str, str] = os.environ) -> Path:
    """The file of $NODEREADY_HOSTFILE, else ./hostfile, else /job/hostfile (DeepSpeed's default).

    Raises InventoryError when none exists.
    """
    named = environ.get("NODEREADY_HOSTFILE")
    if named:
        return Path(named)
    for name in DEFAULT_FILES:
        if Path(name).is_file():
            return Path(name)
    raise _refused(
        "no hostfile: set NODEREADY_HOSTFILE, or put one at " + " or ".join(DEFAULT_FILES)
    )


def with_data(hosts: Mapping[str, int | None]) -> list[tuple[str, dict[str, int]]]:
    """``hosts`` as an inventory names them: (name, data), the slots under ``slots``."""
    return [(name, {} if slots is None else {"slots": slots}) for name, slots in hosts.items()]


# --- The ready nodes of `nodeready ready`, in the forms that launchers read.

#: Form -> its readers.
FORMS = {
    "hostfile": "DeepSpeed and Open MPI: 'gpu001 slots=8'",
    "list": "pdsh, torchrun scripts, ssh loops: a name per line",
    "exclude": "Slurm: the nodes that are not ready, for sbatch --exclude",
}


def text(form: str, ready: Mapping[str, int], not_ready: Iterable[str]) -> str:
    """The file's content.

    form:  one of FORMS
    ready: name -> slots, in the order in which ranks are to be placed
    """
    if form == "exclude":
        names = fold(not_ready)
        return f"{names}\n" if names else ""
    if form == "list":
        return "".join(f"{name}\n" for name in ready)
    return "".join(f"{name} slots={slots}\n" for name, slots in ready.items())
