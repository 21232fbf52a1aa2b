"""What every rank of the job runs: a training whose steps end in an all_reduce, under torchrun.

In step 20 a worker of rank 5's data loader waits in __getitem__ for a file that is never written.
/run/job/rank-RANK has the step whose all_reduce the rank has called last.
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

RANK = os.environ["RANK"]


class Images(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, step):
        time.sleep(0.1)
        if (RANK, step) == ("5", 20):
            read_from_storage()
        return float(step)


def read_from_storage():
    with open("/run/job/go") as file:
        file.read()


def note(step):
    # In one write: a reader never sees half of it.
    number = os.open(f"/run/job/rank-{RANK}", os.O_CREAT | os.O_WRONLY, 0o644)
    os.pwrite(number, f"{step}".ljust(40).encode(), 0)
    os.close(number)


def average(values):
    dist.all_reduce(values)
    return values / dist.get_world_size()


def train():
    for step, images in enumerate(DataLoader(Images(), num_workers=1, prefetch_factor=1)):
        note(step)
        average(torch.tensor([float(images)]))


dist.init_process_group("gloo", timeout=timedelta(hours=1))
train()
