"""Lightning, two processes, and one line for dpro.

    python examples/lightning_ddp.py

Lightning starts the second process itself; under torchrun (any number of nodes) it takes the layout from there.
"""

import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpro_integrations.lightning import DproCallback


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
            nn.Linear(1024, 10),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.net(inputs), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


if __name__ == "__main__":
    L.seed_everything(0)
    inputs = torch.randn(16_384, 256)
    labels = inputs[:, :10].argmax(dim=1)
    trainer = L.Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "2")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        max_epochs=2,
        callbacks=[DproCallback()],  # the one line
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Classifier(), DataLoader(TensorDataset(inputs, labels), batch_size=64, shuffle=True))
