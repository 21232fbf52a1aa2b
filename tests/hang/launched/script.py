"""A script under torchrun, mpirun, srun, accelerate, deepspeed or a shell's loop."""

import os
import sys

import rank

for own, theirs in (("RANK", "OMPI_COMM_WORLD_RANK"), ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"),
                    ("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS")):  # fmt: skip
    if own not in os.environ and theirs in os.environ:
        os.environ[own] = os.environ[theirs]
rank.join()
rank.train(os.environ.get("HANG_DIRECTORY") or sys.argv[-1])
