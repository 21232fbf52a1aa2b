"""A script under torchrun, mpirun or a shell's loop."""

import os
import sys

import rank

for name in ("RANK", "WORLD_SIZE"):
    if name not in os.environ and f"OMPI_COMM_WORLD_{name}" in os.environ:
        os.environ[name] = os.environ[f"OMPI_COMM_WORLD_{name}"]
rank.join()
rank.train(sys.argv[-1])
