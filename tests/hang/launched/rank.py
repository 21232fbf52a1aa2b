"""What a launched rank does: the last one reads a file that is not there yet, the others reduce.

`stand-RANK` in the directory says that it is there; `done-RANK` that it went on.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def read_shard(directory):
    with open(f"{directory}/fifo") as file:
        file.read()


def say(directory, name, words=""):
    with open(f"{directory}/{name}", "w") as file:
        file.write(words)


def train(directory):
    rank, world = dist.get_rank(), dist.get_world_size()
    values = torch.ones(4)
    dist.all_reduce(values)
    say(directory, f"stand-{rank}", str(os.getpid()))
    if rank == world - 1:
        read_shard(directory)
    dist.all_reduce(values)
    say(directory, f"done-{rank}", str(values[0].item()))
    dist.barrier()


def join(**how):
    dist.init_process_group("gloo", timeout=timedelta(hours=1), **how)
