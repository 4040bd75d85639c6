"""The prior's part of a step's gradient, which needs no data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import ArgumentError, ArgumentTypeError
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
            found = [key for key in stated if _fits(key, name)]
            stated = stated[max(found, key=len)] if found else 1.0
        fan_in = math.sqrt(2 / p[0].numel()) if stated == "fan_in" and p.dim() > 1 else 1.0
        result.append(fan_in if stated == "fan_in" else float(stated))
    return result


def require_prior_std(group: Mapping[str, Any]) -> None:
    """Raise unless a group's ``prior_std`` is one of what the optimizers take."""
    stated = group["prior_std"]
    if isinstance(stated, Mapping) and "param_names" not in group:
        raise ArgumentError(
            "a dictionary for prior_std needs parameter names: construct the optimizer with"
            " model.named_parameters()"
        )
    for std in stated.values() if isinstance(stated, Mapping) else [stated]:
        if std == "fan_in":
            continue
        is_number = isinstance(std, Real) or (isinstance(std, Tensor) and std.numel() == 1)
        if not is_number or isinstance(std, bool):
            raise ArgumentTypeError(
                'prior_std must be a number, "fan_in", or a dictionary of these by parameter name,'
                f" got {std!r}"
            )
        if not float(std) > 0:
            raise ArgumentError(f"prior_std must be positive, got {std}")


def require_used(prior_std: PriorStd, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise where a name in a dictionary is no parameter's and no module's."""
    if not isinstance(prior_std, Mapping):
        return
    names = [name for group in groups for name in group["param_names"]]
    for key in prior_std:
        if not any(_fits(key, name) for name in names):
            raise ArgumentError(
                f"prior_std names {key!r}, which is neither a parameter nor a module: the"
                f" parameters are {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
            )


def _fits(key: str, name: str) -> bool:
    return name == key or name.startswith(f"{key}.")


def gradients(log_prior: LogPrior, layout: Layout) -> list[Tensor]:
    """∇r for a ``log_prior``; the Gaussian prior's is written in place by :func:`add`."""
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
    """S/B turns into ĝ = S/B + ∇r(θ)/N."""
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
