"""A real training on four nodes, eight ranks under torchrun; one rank hangs: for pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nodeready.lab import LabNode
from tests.builders.proof import put_py_spy
from tests.command import wait_for

HERE = "/run/job"
NODES, PER_NODE = 4, 2
#: Of `hung_train.py`: which rank hangs, and in which step.
HANGS, STEP = 5, 20

# With `--redirects` and `--tee` because torch 1.13 under Python 3.11 has no value for "none".
TORCHRUN = f"""
setsid /usr/bin/python3 -m torch.distributed.run --nnodes {NODES} --nproc_per_node {PER_NODE} \
    --max_restarts 0 --redirects 1 --tee 2 --log_dir {HERE}/logs \
    --node_rank {{number}} --master_addr {{master}} --master_port 29500 \
    {HERE}/train.py </dev/null >{HERE}/log 2>&1 &
"""


def hang(nodes: Sequence[LabNode]) -> None:
    """Start it, until all others wait for the rank that hangs. Raises AssertionError."""
    program = Path(__file__).with_name("hung_train.py").read_text()
    for node in nodes:
        put_py_spy(node)
        node.write(f"{HERE}/train.py", program)
        node.enter(["mkfifo", f"{HERE}/go"])
        node.enter(["chown", "-R", "ml", HERE])
    for number, node in enumerate(nodes):
        node.run(TORCHRUN.format(number=number, master=nodes[0].name), user="ml")
    files = [
        Path(f"/proc/{nodes[rank // PER_NODE].pid}/root{HERE}/rank-{rank}")
        for rank in range(NODES * PER_NODE)
        if rank != HANGS
    ]
    try:
        wait_for(lambda: all(p.exists() and p.read_text().split() == [f"{STEP}"] for p in files))
    except AssertionError:
        raise AssertionError("\n".join(node.read(f"{HERE}/log") for node in nodes)) from None
