"""Parameters stay finite: none that are not enter a step, and a step that overflows is undone."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import DivergedError
from ..release.layout import Layout
from .settings import Settings

_ORDINARY = 1e9  # numbers below it cannot overflow float32 in one step


def require_finite(layout: Layout) -> float:
    """A number that is at least the norm of the largest parameter.

    Raises:
        DivergedError: a parameter is not finite.
    """
    dtype = None if layout.is_plain else layout.dtype
    norms = torch._foreach_norm(layout.parameters, 2, dtype=dtype)
    # NaN if any is
    largest = sum(map(float, norms)) if len(norms) <= 4 else float(torch.stack(norms).sum())
    if not math.isfinite(largest) and (broken := _not_finite(layout)):
        raise DivergedError(
            f"parameter {broken!r} is not finite, so every record's gradient would count as zero:"
            " go back to a saved state and use a smaller lr. Nothing was charged."
        )
    return largest


class Undo:
    """What a step may have to put back.

    One step cannot take numbers of ordinary size beyond what float32 holds. Only where they are
    not, parameters and state are copied.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        layout: Layout,
        settings: Settings,
        largest: float,
        prior_gradients: list[Tensor] | None,
    ) -> None:
        self._optimizer, self._layout = optimizer, layout
        self._is_needed = not _cannot_overflow(layout, settings, largest, prior_gradients)
        if self._is_needed:
            self._parameters = [p.detach().clone() for p in layout.parameters]
            self._groups = [dict(group) for group in optimizer.param_groups]
            self._states = [
                {
                    name: v.clone() if isinstance(v, Tensor) else v
                    for name, v in optimizer.state[p].items()
                }
                for p in layout.parameters
            ]

    def require_finite(self) -> None:
        """After the step: put everything back and raise if something is not finite."""
        if not self._is_needed or not (broken := self._broken()):
            return
        groups, optimizer = self._optimizer.param_groups, self._optimizer
        for group, old_group in zip(groups, self._groups, strict=True):
            group.clear()
            group.update(old_group)
        for p, old, old_state in zip(
            self._layout.parameters, self._parameters, self._states, strict=True
        ):
            p.copy_(old)
            optimizer.state[p].clear()
            optimizer.state[p].update(old_state)
        for part in self._layout.groups:
            part.kept.clear()  # built anew from the state
        raise DivergedError(
            f"{broken!r} is not finite after this step: use a smaller lr"
            f" (now {', '.join(str(g['lr']) for g in groups)}). Parameters and state are as before;"
            " the charge is kept."
        )

    def _broken(self) -> str:
        if name := _not_finite(self._layout):
            return name
        return next(
            (
                name
                for group in self._optimizer.param_groups
                for name, value in group.items()
                if name != "prior_std" and isinstance(value, float) and not math.isfinite(value)
            ),
            "",
        )


def _cannot_overflow(
    layout: Layout, settings: Settings, largest: float, prior_gradients: list[Tensor] | None
) -> bool:
    bound, steepest = largest, 0.0
    if prior_gradients is not None:
        steepest = float(torch.stack(torch._foreach_norm(prior_gradients)).amax())
    for part in layout.groups:
        noise = part.noise_multiplier if math.isfinite(part.noise_multiplier) else 0.0
        scale: Any = (settings.num_data + 12 * noise) * settings.max_grad_norm
        scale = scale / settings.expected_batch_size
        pull = steepest if prior_gradients is not None else largest / min(part.prior_stds) ** 2
        lr = part.group["lr"]
        bound = max(bound, scale, lr * scale, lr, pull, lr * pull)
    return bound < _ORDINARY and (
        layout.is_plain or all(p.dtype is not torch.float16 for p in layout.parameters)
    )


def _not_finite(layout: Layout) -> str:
    """Name of a parameter that is not finite, or an empty string."""
    return next((name for name, p in layout.named if not bool(torch.isfinite(p).all())), "")
