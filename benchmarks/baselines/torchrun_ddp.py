"""PyTorch's DistributedDataParallel over gloo, as its tutorials have it, on the data and the model of our runs.

torchrun --nproc-per-node=2 -m benchmarks.baselines.torchrun_ddp --arrays FOLDER
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.baselines.common import arguments, log_step, train_arrays


class TwoConvCnn(nn.Module):  # type: ignore[misc,unused-ignore]
    """The two-conv CNN, from pixels of 0 to 255."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(1600, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.layers(images.float() / 255)


def main() -> None:
    """Train."""
    options = arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    dist.init_process_group("gloo")
    images, labels = train_arrays(options.arrays)
    dataset = TensorDataset(torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels))
    sampler: DistributedSampler[object] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=options.global_batch // dist.get_world_size(), sampler=sampler)
    model = DistributedDataParallel(TwoConvCnn())
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    loss_function = nn.CrossEntropyLoss()
    step, epoch = 0, 0
    while step < options.steps:
        sampler.set_epoch(epoch)
        for batch, classes in loader:
            optimizer.zero_grad()
            loss_function(model(batch), classes).backward()
            optimizer.step()
            step += 1
            if dist.get_rank() == 0:
                log_step(step, options.steps)
            if step == options.steps:
                break
        epoch += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
