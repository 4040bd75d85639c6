"""The prior's part of a step's gradient. It needs no data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..release import Layout, require_public

LogPrior = Callable[[Mapping[str, Tensor]], Tensor]
OneStd = float | Literal["fan_in"]
PriorStd = OneStd | Mapping[str, OneStd]


def stds(
    group: Mapping[str, Any], names: Sequence[str], parameters: Sequence[Tensor]
) -> list[float]:
    """σ of each parameter's Gaussian prior."""
    result = []
    for name, p in zip(names, parameters, strict=True):
        stated = group["prior_std"]
        if isinstance(stated, Mapping):
            found = [key for key in stated if fits(key, name)]
            stated = stated[max(found, key=len)] if found else 1.0
        fan_in = math.sqrt(2 / p[0].numel()) if stated == "fan_in" and p.dim() > 1 else 1.0
        result.append(fan_in if stated == "fan_in" else float(stated))
    return result


def fits(key: str, name: str) -> bool:
    """Whether ``key`` names this parameter, or a module that has it."""
    return name == key or name.startswith(f"{key}.")


def gradients(log_prior: LogPrior, layout: Layout) -> list[Tensor]:
    """∇r of a ``log_prior``; :func:`add` itself computes it for the Gaussian prior."""
    with torch.enable_grad():
        named = {
            name: p.detach().requires_grad_()
            for name, p in zip(layout.names, layout.parameters, strict=True)
        }
        value = log_prior(named)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ArgumentError(
                "log_prior must return a scalar tensor, the log density of the parameters"
            )
        require_public("log_prior", [value])
        found = torch.autograd.grad(value, list(named.values()), allow_unused=True)
    result = [
        torch.zeros_like(p) if g is None else -g
        for p, g in zip(layout.parameters, found, strict=True)
    ]
    if not all(bool(torch.isfinite(g).all()) for g in result):
        raise ArgumentError("the gradient of log_prior is not finite at the current parameters")
    return result


def add(found: list[Tensor] | None, layout: Layout, num_data: int) -> None:
    """Turn S/B into ĝ = S/B + ∇r(θ)/N, in place."""
    start = 0
    for part in layout.groups:
        members = slice(start, start + len(part.parameters))
        start = members.stop
        if found is not None:
            torch._foreach_add_(part.gradients, found[members], alpha=1.0 / num_data)
        elif math.isfinite(min(part.prior_stds)):
            weights = [1.0 / (std**2 * num_data) for std in part.prior_stds]
            if len(set(weights)) == 1:
                torch._foreach_add_(part.gradients, part.parameters, alpha=weights[0])
            else:
                for gradient, p, weight in zip(
                    part.gradients, part.parameters, weights, strict=True
                ):
                    gradient.add_(p, alpha=weight)
            if (mean := part.group["prior_mean"]) != 0.0:
                torch._foreach_sub_(part.gradients, [weight * mean for weight in weights])
