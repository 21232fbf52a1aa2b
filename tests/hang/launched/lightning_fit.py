"""Lightning's own launcher: it starts the other ranks with LOCAL_RANK and without RANK."""

import os

import lightning
import rank
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

DIRECTORY = os.environ["HANG_DIRECTORY"]


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, number):
        if number == 2:
            rank.say(DIRECTORY, f"stand-{dist.get_rank()}", str(os.getpid()))
            if dist.get_rank() == dist.get_world_size() - 1:
                rank.read_shard(DIRECTORY)
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(torch.rand(16, 4), batch_size=2))
    rank.say(DIRECTORY, f"done-{os.environ.get('LOCAL_RANK', '0')}", "2.0")
