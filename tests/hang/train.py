"""What every rank of the job runs: a training whose steps end in an all_reduce, under torchrun.

It hangs where /run/job/fault on its node says so, as `LOCAL_RANK KIND`:

checkpoint  waits in another function while the others reduce
loader      its data loader's worker waits, in __getitem__
die         ends where the others make a new group together

/run/job/faulty says that it does, with the step. The first two go on when somebody has opened
/run/job/go to write. When /run/job/end is on the first node, all end at the same step and leave
/run/job/done-RANK: how many steps, and the sum of what was reduced. /run/job/rank-RANK has its
pid, step and phase.
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


def save_checkpoint():
    with open("/run/job/go") as file:
        file.read()


def average(values):
    dist.all_reduce(values)
    return values / dist.get_world_size()


def train():
    total = 0.0
    for step, images in enumerate(DataLoader(Images(), num_workers=1, prefetch_factor=1)):
        if faulty("checkpoint", step):
            save_checkpoint()
        end = RANK == "0" and os.path.exists("/run/job/end")
        phase("reduce", step)
        mean = average(torch.tensor([float(images), float(end)]))
        phase("load", step + 1)
        total += mean[0].item()
        if mean[1]:
            write(f"done-{RANK}", step + 1, total)
            return


def evaluate():
    if faulty("die", -1):
        os._exit(1)
    phase("group", -1)
    dist.new_group()


dist.init_process_group("gloo", timeout=timedelta(hours=1))
train()
evaluate()
