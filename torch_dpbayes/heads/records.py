"""The records of a private head: what may be refused is refused by shapes and types alone, and a
record that cannot be used contributes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

_LARGEST = 1e15  # of a feature, and of a target in its units


def require_features(features: Any, *, views: bool) -> Tensor:
    """``[n, d]``, or ``[n, views, d]`` where there may be views, floating point and not empty."""
    dimensions = (2, 3) if views else (2,)
    if (
        not isinstance(features, Tensor)
        or not features.is_floating_point()
        or features.layout != torch.strided
        or features.dim() not in dimensions
    ):
        shape = (
            f"{features.dtype} of shape {list(features.shape)}"
            if isinstance(features, Tensor)
            else type(features).__name__
        )
        more = " or [n, views, d]" if views else ""
        raise ValueError(
            f"features must be a dense floating-point tensor [n, d]{more}, got {shape}: write"
            " features.flatten(1) for maps."
        )
    if 0 in features.shape:
        raise ValueError(f"features of shape {list(features.shape)} hold nothing to learn from.")
    return features.detach()


def require_targets(targets: Any, count: int, num_classes: int | None) -> Tensor:
    """Labels ``[n]`` of integers, or numbers for a regression."""
    if not isinstance(targets, Tensor):
        targets = torch.as_tensor(targets)
    targets = targets.detach()
    if num_classes is not None and targets.dim() == 2:
        width = targets.shape[1]
        if width != num_classes:
            raise ValueError(
                f"the labels have {width} classes and the head has {num_classes}: write"
                f" PrivateLinear({width})."
            )
        raise ValueError(
            "labels must be integers [n]: write labels.argmax(1) for one-hot rows. Shares of"
            " several classes (mixup) mix two records and are refused."
        )
    if targets.shape != (count,):
        raise ValueError(
            f"there are {count} records of features and targets of shape {list(targets.shape)}:"
            f" targets must be [{count}]."
        )
    if targets.is_complex():
        raise ValueError("targets must be real numbers.")
    if num_classes is not None and targets.is_floating_point():
        raise ValueError(
            f"labels must be integers from 0 to {num_classes - 1}, got {targets.dtype}: write"
            " labels.long(), or PrivateLinear(None, noise_std=...) for a regression."
        )
    # a narrow type would wrap the number of classes that it is compared with
    return targets if num_classes is None and targets.dtype != torch.bool else targets.long()


def usable(features: Tensor, targets: Tensor, num_classes: int | None, unit: float) -> Tensor:
    """Whether each record is finite in single precision, its square too, and has a target that
    there is, ``[n]``. Private data.

    A loss that one record made infinite would be infinite for all.

    Args:
        features, targets: as checked.
        num_classes: K, None for a regression.
        unit: of a regression's targets, their standard deviation.
    """
    # chunk by chunk: a mask of all features would be as many bytes as there are numbers; in single
    # precision, for in half precision the bound itself is infinite
    near = torch.cat(
        [(rows.float().abs() <= _LARGEST).flatten(1).all(1) for rows in features.split(4096)]
    )
    if num_classes is None:
        return near & ((targets.double() / unit).abs() <= _LARGEST).to(near.device)
    return near & ((targets >= 0) & (targets < num_classes)).to(near.device)


class HeadRecords(Dataset[Any]):
    """Rows with a constant 1 behind them, delivered many at a time.

    A record that cannot be used is a row of zeros, without the 1: the gradient of a linear head at
    it is exactly zero.

    Args:
        features: ``[n, d]`` or ``[n, views, d]``, of any floating-point type.
        targets: ``[n]``.
        num_classes: K, None for a regression.
        unit: of a regression's targets.
    """

    def __init__(
        self, features: Tensor, targets: Tensor, num_classes: int | None, unit: float = 1.0
    ) -> None:
        is_usable = usable(features, targets, num_classes, unit)
        targets = targets.to(features.device)
        targets = torch.where(is_usable, targets, torch.zeros_like(targets))
        self._targets = targets.float() if num_classes is None else targets.long()
        self._rows = torch.nn.functional.pad(features, (0, 1), value=1.0)
        self._rows[~is_usable] = 0.0

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        chosen = self.__getitems__([index])
        return chosen.features[0], chosen.targets[0]

    def __getitems__(self, indices: Sequence[int]) -> Chosen:
        where = torch.as_tensor(indices, dtype=torch.long, device=self._rows.device)
        return Chosen(self._rows[where].float(), self._targets[where])


class Chosen:
    """A batch as the loader counts it.

    Args:
        features: ``[rows, ..., d + 1]``.
        targets: ``[rows]``.
    """

    def __init__(self, features: Tensor, targets: Tensor) -> None:
        self.features, self.targets = features, targets

    def __len__(self) -> int:
        return len(self.targets)


def together(batch: Any) -> tuple[Tensor, Tensor]:
    """The tensors of a batch, which are together already."""
    if isinstance(batch, Chosen):
        return batch.features, batch.targets
    features, targets = zip(*batch, strict=True)
    return torch.stack(features), torch.stack(targets)
