"""A model's buffers and frozen parameters, which training must leave as they are.

What the model or its training loop writes there depends on the records and carries no noise, yet it
steers later gradients and is saved with the model's state. Clipping does not see it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import StepError
from .derived import WRITTEN, guard, holds_records

_CHANGED = (
    "{!r} changed while training: buffers and frozen parameters would carry data without noise."
    " Keep statistics (GroupNorm, not BatchNorm) and counters out of the module, as plain Python"
    " numbers, and load a state of before."
)
_LONGEST_WAIT = 64  # steps


class FixedTensors:
    """Buffers and frozen parameters of a module as they were, and whether they still are.

    A look compares identities and torch's version counters. Writes past the counters (``.data``,
    the running statistics of ``batch_norm``) show in the values, which are compared at look 1, 2,
    4, … 64, then at every 64th, and wherever identity or version differ: a tensor with equal
    values, moved to another device or dtype or not, is unchanged. Until the first batch is
    delivered anything may be loaded.

    Args:
        module: the model.

    Attributes:
        values: copies of the tensors by their names in the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.values: dict[str, Tensor] = {}
        self._module = module
        self._is_training = False
        self._counted: list[tuple[int, int]] | None = None
        self._record()

    def begin(self) -> None:
        """The loader is about to deliver: from its first batch on everything stays as it is."""
        if not self._is_training:
            self._is_training = True
            self._record()

    def look_closely(self) -> None:
        """Compare values next time: parameters were frozen or unfrozen, or the model was moved."""
        self._counted = None

    def require_unchanged(self) -> None:
        """Raise if a tensor is not what it was, or a parameter holds values of a batch."""
        counts = self._counts()
        self._looks += 1
        is_due = not self._looks % _LONGEST_WAIT or not self._looks & (self._looks - 1)
        if is_due or counts is None or counts != self._counted:
            self._compare_values()
            self._watch()

    def _counts(self) -> list[tuple[int, int]] | None:
        """Which tensors stand where, and how often they were written to; of inference mode torch
        does not count.
        """
        counts, is_counted = [], True
        for home in self._homes:
            for t in home.values():
                if t is None:
                    continue
                if holds_records(t):
                    raise StepError(WRITTEN, code="model-written")
                if isinstance(t, nn.Parameter) and t.requires_grad:
                    continue
                if t.is_inference():
                    is_counted = False
                else:
                    counts.append((id(t), t._version))
        return counts if is_counted else None

    def _compare_values(self) -> None:
        """Parameters may be frozen, unfrozen or moved; all else has to be what it was."""
        now = _fixed(self._module)
        parameters = {name for name, _ in self._module.named_parameters(remove_duplicate=False)}
        for name in {**self.values, **now}:
            before, t = self.values.get(name), now.get(name)
            if before is None or t is None:
                is_same = name in parameters and (t is None or name in self._names)
            else:
                is_same = same_values(before, t)
            if not is_same:
                raise StepError(_CHANGED.format(name), code="model-buffer")
            if t is None:
                del self.values[name]
            elif before is None or (before.dtype, before.device) != (t.dtype, t.device):
                self.values[name] = t.detach().clone()

    def _record(self) -> None:
        self.values.clear()
        self.values.update((name, t.detach().clone()) for name, t in _fixed(self._module).items())
        self._names = {name for name, _ in self._module.named_parameters(remove_duplicate=False)}
        self._looks = 0
        self._watch()

    def _watch(self) -> None:
        layers = self._module.modules()
        self._homes = [home for layer in layers for home in (layer._buffers, layer._parameters)]
        # an id is of one tensor as long as that is alive
        self._alive = [t for home in self._homes for t in home.values() if t is not None]
        for t in self._alive:
            guard(t)
        self._counted = self._counts()


def same_values(before: Tensor, now: Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN among them, in the device and dtype of
    the second.
    """
    if before.shape != now.shape:
        return False
    before = before.to(now)
    return torch.equal(before, now) or bool(
        ((before == now) | ((before != before) & (now != now))).all()
    )


def _fixed(module: nn.Module) -> dict[str, Tensor]:
    """Under all names of each, which moving the model may turn to tensors of their own."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {
        **dict(module.named_buffers(remove_duplicate=False)),
        **{name: p for name, p in parameters if not p.requires_grad},
    }
