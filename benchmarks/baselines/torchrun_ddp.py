"""PyTorch's DistributedDataParallel over gloo, as in its tutorials, on the data and the model of our runs.

torchrun --nproc-per-node=2 -m benchmarks.baselines.torchrun_ddp --arrays FOLDER

`--input loader` reads through a `DataLoader` over a `TensorDataset`, which collates batches example by example;
`--input index` takes a batch of the tensors by its indices at once. Without `--threads` each process has the threads
that torchrun gives it: one, where there are several processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.baselines.common import SAVED_EVERY, log_step, parser, train_arrays


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
        return self.layers(images.float() / 255)


def batches(dataset: TensorDataset, batch: int, how: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this process's batches, one epoch after the other, indefinitely."""
    sampler: DistributedSampler[object] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=batch, sampler=sampler, drop_last=True)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        epoch += 1
        if how == "loader":
            yield from loader
        else:
            indices = torch.tensor(list(sampler))
            yield from (dataset[each] for each in indices.split(batch) if len(each) == batch)


def save(path: Path, state: dict[str, object]) -> None:
    """Replace the saved state."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def main() -> None:
    """Train."""
    arguments = parser()
    arguments.add_argument("--input", choices=("index", "loader"), default="loader", help="(default: loader)")
    arguments.add_argument("--channels-last", action="store_true", help="keep images with their channels last")
    options = arguments.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    dist.init_process_group("gloo")
    layout = torch.channels_last if options.channels_last else torch.contiguous_format
    images, labels = train_arrays(options.arrays)
    dataset = TensorDataset(torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels))
    model = DistributedDataParallel(TwoConvCnn().to(memory_format=layout), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate, fused=True)
    loss_function = nn.CrossEntropyLoss()
    saved, done = options.state and options.state / "state.pt", 0
    if saved and saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    for step, (batch, classes) in enumerate(
        batches(dataset, options.global_batch // dist.get_world_size(), options.input), done + 1
    ):
        optimizer.zero_grad()
        loss_function(model(batch.contiguous(memory_format=layout)), classes).backward()
        optimizer.step()
        if dist.get_rank() == 0:
            log_step(step, options.steps)
            if saved and step % SAVED_EVERY == 0:
                save(saved, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
        if step == options.steps:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
