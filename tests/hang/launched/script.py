"""A script under torchrun, mpirun, accelerate or a shell's loop."""

import os
import sys

import rank

for name in ("RANK", "WORLD_SIZE"):
    if name not in os.environ and f"OMPI_COMM_WORLD_{name}" in os.environ:
        os.environ[name] = os.environ[f"OMPI_COMM_WORLD_{name}"]
rank.join()
rank.train(os.environ.get("HANG_DIRECTORY") or sys.argv[-1])
