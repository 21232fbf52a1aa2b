"""Run the mesh over the nodes of an inventory, as a command would, and print what came of it.

    mesh_driver.py INVENTORY FIRST LAST SECONDS [full] [job NUMBER: over srun]

One JSON object: ``nodes`` (name -> mesh or unknown), ``results`` (name -> the checks' results),
``connections`` (made, as the sources count them), ``came`` (as the listeners do), ``rounds``,
``seconds``.
"""

# Before anything that opens a socket.
# ruff: noqa: E402
from nodeready.cli import patch  # isort: skip

patch()

import dataclasses
import json
import sys
import time

from nodeready.cli.start import interrupt_on_signals
from nodeready.inventory import load as inventory
from nodeready.inventory.load import policies
from nodeready.policy import Policy
from nodeready.ready import run as mesh_run
from nodeready.ready.run import run_mesh
from nodeready.subjects.proof import reach
from nodeready.subjects.proof.facts import Mesh, Proved, User
from nodeready.transport.allocation import running
from nodeready.transport.base import collect
from nodeready.transport.look import look_at
from nodeready.transport.srun import Srun
from nodeready.transport.ssh import Fleet

runs = []


class Kept(mesh_run._Run):
    """The run, kept to be counted."""

    def __init__(self, *given):
        super().__init__(*given)
        runs.append(self)

    def rounds(self, full):
        print("rounds", file=sys.stderr, flush=True)
        super().rounds(full)


mesh_run._Run = Kept


def main(path, first, last, seconds, *how):
    interrupt_on_signals()
    loaded = inventory.load(path)
    hosts = list(loaded)
    wanted = policies(loaded, hosts)
    steps = Srun(running(how[how.index("job") + 1])) if "job" in how else None
    with steps or Fleet(loaded, hosts) as carrier:
        names = () if steps else carrier.nodes
        conversations = {name: look_at(name, wanted[name], ("ptrace",)) for name in names}
        seen = collect(carrier, conversations).items()
        nodes = carrier.nodes if steps else [name for name, one in seen if one.kind == ""]
        began = time.monotonic()
        ports = int(first), int(last)
        deadline = began + float(seconds)
        seen = run_mesh(carrier, nodes, ports, deadline, full="full" in how)
        seconds = round(time.monotonic() - began, 2)
    run = runs[0]
    results = {}
    for name, one in seen.items():
        proved = Proved(User("root", 0, False, ""), mesh=one)
        checks = (reach.ports, reach.mesh)
        results[name] = {
            found.check: [found.status, found.actual]
            for found in (check(proved, Policy(port_range=ports)) for check in checks)
        }
    print(
        json.dumps(
            {
                "nodes": {name: dataclasses.asdict(one) for name, one in seen.items()},
                "unknown": [name for name, one in seen.items() if not isinstance(one, Mesh)],
                "results": results,
                "connections": run.seen.connections,
                "came": run.seen._came,
                "rounds": run.made,
                "seconds": seconds,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
