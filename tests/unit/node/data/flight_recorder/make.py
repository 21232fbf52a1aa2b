"""The recorder of torch 2.15 with gloo: its dumps are the files beside this one.

OUT=DIR TORCH_FR_DUMP_TEMP_FILE=DIR/late_ torchrun --standalone --nproc-per-node 4 make.py late
"""

import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c

mode = sys.argv[1]


def step(x):
    dist.all_reduce(x)


def dump():
    time.sleep(8)
    c._dump_fr_trace_file(dist.get_rank(), True, True, False)
    out, r = Path(os.environ["OUT"]), dist.get_rank()
    (out / f"{mode}.json_{r}").write_bytes(c._dump_fr_trace_json(True, False))
    (out / f"{mode}.status_{r}").write_bytes(c._dump_fr_trace(False, False, False))
    time.sleep(6)
    os._exit(0)


def main():
    dist.init_process_group("gloo")
    r = dist.get_rank()
    threading.Thread(target=dump, daemon=True).start()
    x = torch.ones(16)
    for _ in range(3):
        step(x)
    sub = dist.new_group([0, 1], group_desc="tp") if mode == "group" else None
    if sub is not None and r == 0:
        dist.all_reduce(torch.ones(8), group=sub)
    if mode == "late" and r == 3:
        time.sleep(100)
    if mode == "types":
        # gloo does not compare: everybody waits, or is wrong
        if r == 2:
            dist.broadcast(torch.ones(16, dtype=torch.float64), src=0)
            dist.broadcast(torch.ones(16, dtype=torch.float64), src=3)
        else:
            step(x)

    step(x)
    time.sleep(100)


main()
