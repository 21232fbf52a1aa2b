"""When the last job that completed ended on each node, by Slurm's accounting."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from datetime import datetime
from shutil import which

from nodeready.shell import search_path

#: Seconds for `sacct`: a large accounting database answers in some seconds.
_TIMEOUT_S = 20
_MAX_LINES = 100_000


def last_job_ends(
    nodes: Collection[str], since_s: float, environ: Mapping[str, str] = os.environ
) -> tuple[dict[str, float], str]:
    """Node -> the end of its last completed job, in seconds since 1970; and what failed, or ""."""
    # Imported only here, because they import pyinfra, which is slow.
    from pyinfra.api.exceptions import InventoryError

    from nodeready.inventory.slurm import ask

    path = search_path(environ.get("PATH", ""))
    if not which("sacct", path=path):
        return {}, "sacct is not installed here"
    start = datetime.fromtimestamp(since_s).isoformat(timespec="seconds")
    argv = ["sacct", f"--nodelist={','.join(nodes)}", f"--starttime={start}", "--endtime=now"]
    argv += ["--allusers", "--allocations", "--state=COMPLETED", "--noheader", "--parsable2"]
    try:
        text = ask([*argv, "--format=End,NodeList"], path, _TIMEOUT_S)
    except InventoryError as error:
        return {}, str(error)
    return parse_ends(text), ""


def parse_ends(text: str) -> dict[str, float]:
    """Node -> its latest end, of the rows ``END|NODES``. Other lines are left out."""
    from nodeready.inventory.nodeset import NodeSetError, expand

    latest: dict[str, float] = {}
    for line in text.splitlines()[:_MAX_LINES]:
        end, _, words = line.partition("|")
        try:
            # A time of Slurm is in this machine's time zone.
            end_s = datetime.fromisoformat(end).timestamp()
            names = expand(words)
        except (ValueError, OverflowError, OSError, NodeSetError):
            continue
        for name in names:
            latest[name] = max(end_s, latest.get(name, 0.0))
    return latest
