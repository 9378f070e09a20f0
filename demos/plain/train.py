"""A classifier trained with data from two worker processes; it knows torch, and nothing of us.

Run it as it is, then on an accelerator that does not hold model and optimizer state at once:

    python demos/plain/train.py
    torchtensorref run --device sim --budget 1MiB demos/plain/train.py

The losses are the same to the last digit.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Waves(Dataset):
    """Sine waves of four frequencies, with noise."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        noise = torch.Generator().manual_seed(index)
        wave = torch.sin(torch.linspace(0, 10, 128) * (1 + index % 4))
        return wave + 0.3 * torch.randn(128, generator=noise), index % 4


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = DataLoader(Waves(), batch_size=64, num_workers=2)
    for epoch in range(3):
        total = 0.0
        for waves, kinds in batches:
            loss = nn.functional.cross_entropy(model(waves), kinds)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / len(batches):.9f}")


if __name__ == "__main__":
    main()
