"""Run the mesh over the nodes of an inventory, as a command would, and print what came of it.

    mesh_driver.py INVENTORY FIRST LAST SECONDS [full] [job NUMBER: over srun]

One JSON object: ``unknown`` (the nodes without a mesh) and ``results`` (name -> the checks'
results).
"""

# Before anything that opens a socket.
# ruff: noqa: E402
from nodeready.cli import patch  # isort: skip

patch()

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


class Announced(mesh_run._Run):
    """A run that says when its rounds begin."""

    def rounds(self, full):
        print("rounds", file=sys.stderr, flush=True)
        super().rounds(full)


mesh_run._Run = Announced


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
        ports = int(first), int(last)
        deadline = time.monotonic() + float(seconds)
        seen = run_mesh(carrier, nodes, ports, deadline, full="full" in how)
    results = {}
    for name, one in seen.items():
        proved = Proved(User("root", 0, False, ""), mesh=one)
        checks = (reach.ports, reach.mesh)
        results[name] = {
            found.check: [found.status, found.actual]
            for found in (check(proved, Policy(port_range=ports)) for check in checks)
        }
    unknown = [name for name, one in seen.items() if not isinstance(one, Mesh)]
    print(json.dumps({"unknown": unknown, "results": results}))


if __name__ == "__main__":
    main(*sys.argv[1:])
