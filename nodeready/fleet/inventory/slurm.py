"""The nodes that Slurm knows: of this job, of a partition, or all of them.

An installed tool of Slurm that fails or hangs is an error: an inventory that silently lost its
partitions would silently lose their settings.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from pyinfra.api.exceptions import InventoryError

from nodeready.core.settings import suggestion
from nodeready.core.shell import find_program, search_path
from nodeready.core.text import sanitise
from nodeready.fleet.inventory.nodeset import NodeSetError, expand, host_name, natural, unique

# --- The nodes on which Slurm runs a job, and the inventory's nodes that are not among them.


@dataclass(frozen=True)
class JobPlacement:
    """A job in Slurm's records."""

    user: str = ""  # uid of the job's user; "": Slurm knows no such job
    # Slurm's names of the job's nodes; (): not known, as of a job that waits
    nodes: tuple[str, ...] = ()
    # nodes of the inventory on which Slurm does not run the job; without nodes whose name in Slurm
    # is unknown
    other_nodes: frozenset[str] = frozenset()
    parts: tuple[str, ...] = ()  # numbers of the further parts of a heterogeneous job


def other_nodes(
    names: Iterable[str], job_nodes: Collection[str], aliases: Mapping[str, Collection[str]]
) -> frozenset[str]:
    """The names, from an inventory, of nodes that are none of the job's nodes.

    job_nodes: Slurm's names of the job's nodes
    aliases:   Slurm's name of each of its nodes -> host name and address

    The inventory may name a node by its name in Slurm, its host name, its address, or one of these
    with or without a domain. A name that fits several nodes must fit none of the job's nodes.

    >>> sorted(other_nodes(["gpu1", "gpu2.site", "x9"], ["gpu1"], {"gpu1": [], "gpu2": []}))
    ['gpu2.site']
    """
    nodes_by_name: dict[str, set[str]] = defaultdict(set)
    nodes_by_label: dict[str, set[str]] = defaultdict(set)
    for node in {*job_nodes, *aliases}:
        for alias in (node, *aliases.get(node, ())):
            nodes_by_name[alias.lower()].add(node)
            nodes_by_label[_first_label(alias)].add(node)
    outside_names = set()
    for name in names:
        slurm_nodes = nodes_by_name.get(name.lower()) or nodes_by_label.get(_first_label(name))
        if slurm_nodes and slurm_nodes.isdisjoint(job_nodes):
            outside_names.add(name)
    return frozenset(outside_names)


def _first_label(name: str) -> str:
    """A host name without its domain; an address stays whole."""
    label = name.lower().partition(".")[0]
    return name if label.isdecimal() or ":" in label else label


# --- The nodes of Slurm.

#: Seconds for one answer. Slurm's own MessageTimeout is 10 s by default, and its tools try a
#: backup controller after that; a controller that needs longer is not working.
TIMEOUT_S = 15
#: The characters of a node list (slurm.conf(5), NodeName).
_NODE_LIST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,\[\]-]*")
# Names that pyinfra's Inventory takes for itself; "all" is every node of the inventory.
_NO_GROUPS = frozenset({"all", "self", "names_data", "override_data"})


def inventory() -> dict[str, list[str]]:
    """The chosen nodes under "all", and the nodes among them of each partition under its name.

    The nodes are those of the job ($SLURM_JOB_NODELIST, $SLURM_NODELIST), else of the partition
    in $NODEREADY_PARTITION, else all that `sinfo` knows. Groups need `sinfo`; without it, a job's
    own partition ($SLURM_JOB_PARTITION) is the only one.
    Raises InventoryError, one line.
    """
    text = os.environ.get("SLURM_JOB_NODELIST") or os.environ.get("SLURM_NODELIST") or ""
    partition = os.environ.get("NODEREADY_PARTITION", "")
    partitions: dict[str, list[str]] = {}
    if find_program("sinfo"):
        partitions = _partitions(ask(["sinfo", "-a", "-h", "-N", "-o", "%N %R"]))
    if text:
        chosen = job_nodes(text)
        if not partitions and os.environ.get("SLURM_JOB_PARTITION"):
            partitions = {os.environ["SLURM_JOB_PARTITION"]: chosen}
    elif not partitions:
        places = "inside a job (SLURM_JOB_NODELIST is not set), or where sinfo"
        raise InventoryError(f"no Slurm here: run {places} is installed and shows nodes")
    elif partition:
        if partition not in partitions:
            hint = f"no partition {sanitise(partition, 80)}; {suggestion(partition, partitions)}"
            raise InventoryError(f"NODEREADY_PARTITION: {hint}")
        chosen = partitions[partition]
    else:
        chosen = sorted({name for part in partitions.values() for name in part}, key=natural)
    chosen_names = set(chosen)
    groups = {
        group: [name for name in members if name in chosen_names]
        for group, members in partitions.items()
        if group not in _NO_GROUPS and not group.startswith("_")
    }
    return {"all": chosen, **{group: members for group, members in groups.items() if members}}


def job_nodes(text: str) -> list[str]:
    """The nodes in a job's node list, by `scontrol` if it is installed. Raises InventoryError."""
    if not _NODE_LIST.fullmatch(text):
        raise InventoryError(f"SLURM_JOB_NODELIST is no list of nodes: {sanitise(text, 80)!r}")
    try:
        if find_program("scontrol"):
            out = ask(["scontrol", "show", "hostnames", text])
            return unique(host_name(name) for name in out.split())
        return expand(text)
    except NodeSetError as error:
        raise InventoryError(f"SLURM_JOB_NODELIST: {error}") from None


def job_inventory(job: str) -> dict[str, list[str]]:
    """The job's nodes under "all", and those of each of its partitions under its name.

    job: a job, a task of an array job or a part of a heterogeneous job; the number of an array or
         of a heterogeneous job stands for all its tasks or parts
    Raises InventoryError, one line.
    """
    if not re.fullmatch(r"[0-9]{1,10}([_+][0-9]{1,10})?", job):
        raise InventoryError(f"@slurm/{sanitise(job, 60)}: is no number of a Slurm job")
    try:
        out = ask(["squeue", "-h", "-a", "-t", "all", "-j", job, "-o", "%T|%P|%N"])
    except InventoryError as error:
        unknown = "Slurm knows no such job" if "Invalid job id" in str(error) else error
        raise InventoryError(f"@slurm/{job}: {unknown}") from None
    rows = [row.split("|") for row in out.split()]
    groups: dict[str, list[str]] = {"all": []}
    for _, partition, nodes in (row for row in rows if len(row) == 3 and row[2]):
        names = job_nodes(nodes)
        groups["all"] = unique([*groups["all"], *names])
        if partition not in _NO_GROUPS:
            groups[partition] = unique([*groups.get(partition, []), *names])
    if not groups["all"]:
        states = ", ".join(unique(row[0] for row in rows)) or "does not run any more"
        raise InventoryError(f"@slurm/{job}: the job has no nodes: {sanitise(states, 60)}")
    return groups


def job_placement(job: str, names: Iterable[str]) -> JobPlacement:
    """The job's user and nodes by Slurm's tools, and the nodes among ``names`` without the job.

    Clusters without Slurm also have numbered jobs (torchrun's run id), so nothing is an error.
    """
    if not re.fullmatch(r"\d{1,10}", job) or not find_program("squeue"):
        return JobPlacement()
    try:
        argv = ["squeue", "-h", "-a", "-t", "all", "-j", job, "-o", "%A|%i|%U|%N"]
        rows = [row.split("|") for row in ask(argv).splitlines()]
    except InventoryError:
        return JobPlacement()
    rows = [row for row in rows if len(row) == 4 and row[2].isdecimal()]
    if not rows:
        return JobPlacement()
    user = rows[0][2]
    # The number of an array stands for all its tasks, but is the job number of one task only. The
    # first part's number is that of a heterogeneous job; each further part has another number.
    parts_of_job = (row for row in rows if row[0] == job or row[1].startswith(f"{job}+"))
    texts = {number: text for number, _, _, text in parts_of_job}
    parts = tuple(number for number in texts if number != job)
    try:
        is_complete = all(texts.values())
        nodes = unique(n for text in texts.values() for n in expand(text)) if is_complete else []
        aliases = _aliases() if nodes else {}
    except (NodeSetError, InventoryError):
        return JobPlacement(user, parts=parts)
    return JobPlacement(user, tuple(nodes), other_nodes(names, nodes, aliases), parts)


def _aliases() -> dict[str, list[str]]:
    """Slurm's name of each node -> its host name and its address. Raises InventoryError."""
    if not find_program("sinfo"):
        return {}
    out = ask(["sinfo", "-h", "-a", "-N", "-o", "%N|%n|%o"])
    rows = [row.split("|") for row in out.split()]
    return {row[0]: row[1:] for row in rows if len(row) == 3}


def _partitions(out: str) -> dict[str, list[str]]:
    """The nodes of each partition, from lines of "NODE PARTITION", both in natural order.

    sinfo's own order changes from call to call, and the order of a node's groups decides whose
    setting holds: that of the last by name.
    """
    names_of: dict[str, list[str]] = {}
    for line in filter(str.strip, out.split("\n")):
        try:
            name, partition = line.split()
            names_of.setdefault(partition, []).append(host_name(name))
        except ValueError:
            raise InventoryError(f"sinfo printed what is no node: {line[:80]!a}") from None
    return {name: sorted({*names_of[name]}, key=natural) for name in sorted(names_of, key=natural)}


def ask(command: list[str], timeout_s: float = TIMEOUT_S) -> str:
    """What the command prints. Raises InventoryError when it fails or takes too long."""
    shown = " ".join(command[:3])
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env={**os.environ, "PATH": search_path(), "LC_ALL": "C"},
            start_new_session=True,
        )
    except OSError as error:
        raise InventoryError(f"cannot run {shown}: {error.strerror}") from None
    try:
        out, problem = child.communicate(timeout=timeout_s)
    except BaseException as error:
        _end(child)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        message = _last_line(error.stderr or b"") or "is slurmctld up? (scontrol ping)"
        raise InventoryError(f"{shown} gave no answer in {timeout_s:g} s: {message}") from None
    if child.returncode:
        message = _last_line(problem) or f"exit code {child.returncode}"
        raise InventoryError(f"{shown} failed: {message}")
    return out.decode("utf-8", "replace")


def _last_line(problem: bytes) -> str:
    """The last line of a command's standard error."""
    return sanitise(problem.decode("utf-8", "replace").strip().split("\n")[-1], 200)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the command's process group, without waiting for a process that cannot be killed."""
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=1)
    for stream in (child.stdout, child.stderr):
        if stream is not None:
            stream.close()
