"""What every rank of the job runs: a training whose steps end in an all_reduce, under torchrun.

Where /run/job/fault on its node is `LOCAL_RANK loader`, a worker of the rank's data loader waits,
in __getitem__, until somebody has opened /run/job/go to write; /run/job/faulty says that it does.
/run/job/rank-RANK has the rank's pid, step and phase.
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

RANK, LOCAL_RANK = os.environ["RANK"], os.environ["LOCAL_RANK"]
FAULT = "/run/job/fault"


def faulty(kind, step):
    """Whether this rank shall be so now; if it shall, whoever waits for that can read it."""
    try:
        with open(FAULT) as file:
            shall = file.read().split() == [LOCAL_RANK, kind]
    except FileNotFoundError:
        return False
    if shall:
        write("faulty", step)
    return shall


def write(name, *words):
    # At once: whoever reads beside us never sees half of it.
    number = os.open(f"/run/job/{name}", os.O_CREAT | os.O_WRONLY, 0o644)
    os.pwrite(number, " ".join(map(str, words)).ljust(40).encode(), 0)
    os.close(number)


def phase(name, step):
    write(f"rank-{RANK}", os.getpid(), step, name)


class Images(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, step):
        time.sleep(0.1)
        if faulty("loader", step):
            read_from_storage()
        return float(step)


def read_from_storage():
    with open("/run/job/go") as file:
        file.read()


def average(values):
    dist.all_reduce(values)
    return values / dist.get_world_size()


def train():
    for step, images in enumerate(DataLoader(Images(), num_workers=1, prefetch_factor=1)):
        phase("reduce", step)
        average(torch.tensor([float(images)]))
        phase("load", step + 1)


dist.init_process_group("gloo", timeout=timedelta(hours=1))
train()
