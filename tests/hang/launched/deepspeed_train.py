"""DeepSpeed's launcher and engine, with ZeRO's first stage."""

import os

import deepspeed
import rank
import torch
import torch.distributed as dist

DIRECTORY = os.environ["HANG_DIRECTORY"]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, batch):
        return self.layer(batch).sum()


deepspeed.init_distributed(dist_backend="gloo")
settings = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 0},
}
engine, *_ = deepspeed.initialize(model=Model(), config=settings)
for step in range(4):
    loss = engine(torch.rand(2, 4))
    if step == 2:
        rank.say(DIRECTORY, f"stand-{dist.get_rank()}", str(os.getpid()))
        if dist.get_rank() == dist.get_world_size() - 1:
            rank.read_shard(DIRECTORY)
    engine.backward(loss)
    engine.step()
rank.say(DIRECTORY, f"done-{dist.get_rank()}", "2.0")
