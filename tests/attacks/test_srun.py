"""A node of a job whose root is hostile costs its own row, over srun too."""

import pytest

from nodeready.agent.asking import Request
from nodeready.fleet.transport.srun import OwnJob
from tests.lab.test_transports import root_slurm

__all__ = ["root_slurm"]

#: In place of `timeout`, with which each of our commands begins: the script comes to its input.
EVIL = r"""#!/usr/bin/python3 -I
import re, sys, time

OTHERS = %r
nonce = re.search(rb"nodeready-[0-9a-f]{16}", sys.stdin.buffer.read())[0].decode()
for name in OTHERS:
    print(f"srun: error: Task launch for StepId=1.0 failed on node {name}: it is broken",
          f"srun: unrecognized option --overlap\\n{name}: it is broken", sep="\\n",
          file=sys.stderr, flush=True)
    print(nonce, "at", name)
    print("forged", f"\\r0: {nonce} at {name}\\r0: forged\\n0: {nonce} end", sep="\\n")
    print(nonce, "end", flush=True)
while True:
    print("A" * 5000)
    print("A" * 5000, file=sys.stderr)
"""


@pytest.mark.usefixtures("root_slurm")
def test_a_hostile_node_of_a_job_changes_no_answer_of_another(slurm_lab):
    first, evil, last = slurm_lab.nodes
    evil.write("/usr/local/bin/timeout", EVIL % [first.name, last.name], 0o755)
    try:
        with OwnJob([node.name for node in slurm_lab.nodes]) as transport:
            asks = [Request(name, "sleep 1; hostname", 5) for name in transport.nodes]
            for _ in range(2):
                answers = dict(transport.ask(asks))
                own = answers.pop(evil.name)
                assert "a task may answer only for its own node" in own.gap.reason
                assert {name: one.stdout.strip() for name, one in answers.items()} == {
                    node.name: node.name for node in (first, last)
                }
    finally:
        evil.enter(["rm", "-f", "/usr/local/bin/timeout"])
