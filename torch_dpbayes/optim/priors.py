"""The prior's share of a step's gradient, which needs no data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..release.layout import Layout
from ..release.release import require_public

LogPrior = Callable[[Mapping[str, Tensor]], Tensor]


def gradients(log_prior: LogPrior | None, layout: Layout) -> list[Tensor] | None:
    """∇r for a ``log_prior``; None for the Gaussian prior, which :func:`add` writes in place."""
    if log_prior is None:
        return None
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
        group, members = part.group, slice(start, start + len(part.parameters))
        start = members.stop
        if found is not None:
            torch._foreach_add_(part.gradients, found[members], alpha=1.0 / num_data)
        elif math.isfinite(group["prior_std"]):
            weight = 1.0 / (group["prior_std"] ** 2 * num_data)
            torch._foreach_add_(part.gradients, part.parameters, alpha=weight)
            if group["prior_mean"] != 0.0:
                part.gradient.sub_(weight * group["prior_mean"])
