"""Made-up pictures in torchvision's layout: bars, one height for each class."""

import struct
from pathlib import Path

import torch


def write(folder: Path, part: str, count: int) -> None:
    """``count`` pictures of 28 x 28 of ten classes; ``part`` is "train" or "t10k"."""
    labels = torch.arange(count, dtype=torch.uint8) % 10
    pictures = torch.randint(0, 50, (count, 28, 28), dtype=torch.uint8)
    for picture, label in zip(pictures, labels.tolist(), strict=True):
        picture[2 * label : 2 * label + 4] += 200
    raw = folder / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    head = struct.pack(">iiii", 2051, count, 28, 28)
    (raw / f"{part}-images-idx3-ubyte").write_bytes(head + pictures.numpy().tobytes())
    head = struct.pack(">ii", 2049, count)
    (raw / f"{part}-labels-idx1-ubyte").write_bytes(head + labels.numpy().tobytes())
