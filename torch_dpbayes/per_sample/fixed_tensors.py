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
        self._record()

    def begin(self) -> None:
        """The loader is about to deliver: from its first batch on everything stays as it is."""
        if not self._is_training:
            self._is_training = True
            self._record()

    def look_closely(self) -> None:
        """Compare values next time: parameters were frozen or unfrozen, or the model was moved."""
        self._is_known = False

    def require_unchanged(self) -> None:
        """Raise if a tensor is not what it was, or a parameter holds values of a batch."""
        tensors = (t for home in self._homes for t in home.values() if t is not None)
        if any(map(holds_records, tensors)):
            raise StepError(WRITTEN, code="model-written")
        if (changed := self._changed()) is not None:
            raise StepError(_CHANGED.format(changed), code="model-buffer")

    def _changed(self) -> str | None:
        """Name of a tensor that is not what it was."""
        self._looks += 1
        is_due = not self._looks % _LONGEST_WAIT or not self._looks & (self._looks - 1)
        if self._is_known and not is_due and self._is_as_counted():
            return None
        parameters = dict(self._module.named_parameters(remove_duplicate=False))
        now = _fixed(self._module)
        for name in self.values.keys() - now.keys():
            if name not in parameters:
                return name
            del self.values[name]  # unfrozen
        for name, t in now.items():
            before = self.values.get(name)
            if before is None and not (name in self._names and name in parameters):
                return name
            if before is not None and not same_values(before, t):
                return name
            if before is None or (before.dtype, before.device) != (t.dtype, t.device):
                self.values[name] = t.detach().clone()  # frozen since, or moved
        self._watch()
        return None

    def _is_as_counted(self) -> bool:
        """Whether the same tensors stand in the same places, with the same version counters."""
        if sum(map(len, self._homes)) != self._places:
            return False
        return all(
            home.get(name) is t and (t is None or t._version == version)
            for home, name, t, version in self._cells
        )

    def _record(self) -> None:
        self.values.clear()
        self.values.update((name, t.detach().clone()) for name, t in _fixed(self._module).items())
        self._names = {name for name, _ in self._module.named_parameters(remove_duplicate=False)}
        self._looks = 0
        self._watch()

    def _watch(self) -> None:
        fixed = {id(t) for t in _fixed(self._module).values()}
        self._homes = [
            home for layer in self._module.modules() for home in (layer._buffers, layer._parameters)
        ]
        for t in (t for home in self._homes for t in home.values() if t is not None):
            guard(t)
        self._places = sum(map(len, self._homes))
        cells = [
            (home, name, t)
            for home in self._homes
            for name, t in home.items()
            if t is None or id(t) in fixed
        ]
        # tensors of inference mode have no version
        self._is_known = not any(t is not None and t.is_inference() for _, _, t in cells)
        self._cells = [
            (home, name, t, 0 if t is None else t._version)
            for home, name, t in cells
            if self._is_known
        ]


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
