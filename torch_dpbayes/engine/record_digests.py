"""Digests of a few records, by which ranks see that all of them have the same data."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ..batches.poisson_loader import PoissonLoader
from ..errors import ArgumentError


def records_digests(loader: PoissonLoader) -> dict[str, str | None]:
    """Digests of up to 64 records in their order, of augmented ones under one seed: of each
    part of a record, None if it differs at every look.

    Ranks that keep the same records in another order would use some of them twice.

    Raises:
        ValueError: the parts that stay the same do not tell records apart.
    """
    collate: Any = loader.collate_fn
    while hasattr(collate, "wrapped_collator_fn"):
        collate = collate.wrapped_collator_fn
    num_data = len(loader.dataset)
    positions = sorted({round(i * (num_data - 1) / 63) for i in range(64)})

    def look() -> defaultdict[str, list[bytes]]:
        parts: defaultdict[str, list[bytes]] = defaultdict(list)
        with _one_seed():
            for i in positions:
                _digest_into(parts, "record", collate([loader.dataset[i]]))
        return parts

    first, second = look(), look()
    lasting = {part: digests for part, digests in first.items() if second[part] == digests}
    if len(lasting) < len(first) and all(len(set(digests)) == 1 for digests in lasting.values()):
        raise ArgumentError(
            "the records differ at every look: let the data set draw from torch's, NumPy's or"
            " Python's global random numbers, or hand out a label with every record, so that ranks"
            " can compare them."
        )
    return {
        part: (
            hashlib.blake2b(b"".join(lasting[part]), digest_size=16).hexdigest()
            if part in lasting
            else None
        )
        for part in first
    }


@contextlib.contextmanager
def _one_seed() -> Iterator[None]:
    """Python's, NumPy's and torch's global random numbers are always the same inside, and go
    on afterwards as if nothing had been.
    """
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _digest_into(parts: Mapping[str, list[bytes]], part: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        parts[f"{part}, its shape"].append(
            hashlib.blake2b(repr((value.dtype, tuple(value.shape))).encode()).digest()
        )
        parts[part].append(
            hashlib.blake2b(
                value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            ).digest()
        )
    elif isinstance(value, Mapping):
        for name, item in value.items():
            _digest_into(parts, f"{part}[{name!r}]", item)
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            _digest_into(parts, f"{part}[{i}]", item)
