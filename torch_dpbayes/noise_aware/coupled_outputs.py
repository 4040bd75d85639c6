"""How a loss makes the outputs of a record depend on each other, as that of a softmax does."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..ops.models import Loss

_SEEN = 1e-5  # of the largest entry; float32 has seven digits
_LARGEST_LAYER = 1000  # outputs whose second derivatives are computed


class Coupling(NamedTuple):
    """Second derivatives of the loss in a record's outputs that are not on the diagonal."""

    layer: str | None
    """The name of the linear layer that makes these outputs; None if there is none."""
    basis: Tensor
    """Q ``[K, K]``, orthogonal, in float64: in Qᵀ·outputs the second derivatives are diagonal.
    Empty where there is no layer."""
    told: Tensor
    """Which of those the loss depends on, ``[K]``."""


def coupled_outputs(module: nn.Module, loss: Loss, inputs: Any, targets: Any) -> Coupling | None:
    """Whether, and where, the Hessian of the loss in a record's outputs has entries off the
    diagonal. Then so does the curvature of the parameters, whatever the records are.

    It is asked of one record of zeros however many there are, so that nothing of the data is in the
    answer; None where module or loss do not take one, or records are not tensors.

    Args:
        module, loss, inputs, targets: as for
            :func:`~torch_dpbayes.noise_aware.laplace_for_module`.
    """
    try:
        record, target = pytree.tree_map(_zeros, inputs), _zeros(targets)
        net = deepcopy(module).eval().requires_grad_(False)
        found = _of_last_layer(net, loss, record, target)
        if found is not None:
            return found
        outputs = net(record)
        slope, point = _slope(lambda z: loss(z, target).sum(), outputs, 1.0)
        row = _row(slope, point, 0)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None
    if not bool((row[1:].abs() > _SEEN * row.abs().max()).any()):
        return None
    return Coupling(None, torch.empty(0, 0), torch.empty(0))


def _of_last_layer(net: nn.Module, loss: Loss, record: Any, target: Tensor) -> Coupling | None:
    """Of the outputs of the linear layer that is called last; whatever comes after it counts as
    part of the loss.
    """
    called: list[tuple[str, nn.Module, Tensor]] = []
    linear = [(name, m) for name, m in net.named_modules() if isinstance(m, nn.Linear)]
    hooks = [
        m.register_forward_hook(lambda m, _given, out, name=name: called.append((name, m, out)))
        for name, m in linear
    ]
    net(record)
    for hook in hooks:
        hook.remove()
    if not called:
        return None
    name, layer, outputs = called[-1]
    if outputs.dim() != 2 or outputs.shape[1] > _LARGEST_LAYER:
        return None

    def value(z: Tensor) -> Tensor:
        hook = layer.register_forward_hook(lambda *_given: z)
        try:
            return loss(net(record), target).sum()
        finally:
            hook.remove()

    # the loss is that of a softmax near one point and near another, or it is taken as coupled only
    slopes, hessians = [], []
    for scale in (0.1, -1.0):
        slope, point = _slope(value, outputs, scale)
        hessians.append(torch.stack([_row(slope, point, k) for k in range(slope.numel())]))
        slopes.append(slope.detach().flatten().double())
    first = hessians[0].double()
    first = (first + first.T) / 2
    if not bool(first.isfinite().all()):
        return None
    size = float(first.abs().max())
    if not bool(((first - first.diag().diag()).abs() > _SEEN * size).any()):
        return None
    values, basis = torch.linalg.eigh(first)
    told = values.abs() > _SEEN * size
    silent = basis[:, ~told]
    for slope, hessian in zip(slopes, hessians, strict=True):
        still = float((slope @ silent).norm()) <= _SEEN * float(slope.norm())
        flat = float((hessian.double() @ silent).norm()) <= _SEEN * float(hessian.norm())
        if not still or not flat:
            told = torch.ones_like(told)
    return Coupling(name, basis, told)


def _slope(
    value: Callable[[Tensor], Tensor], outputs: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The derivative of the loss, and where: near ``outputs``, but with outputs apart from each
    other, as at equal ones some losses have a corner.
    """
    steps = scale * torch.linspace(0, 1, outputs.numel(), dtype=outputs.dtype)
    with torch.enable_grad():
        point = (
            outputs.detach() + steps.to(outputs.device).reshape(outputs.shape)
        ).requires_grad_()
        (slope,) = torch.autograd.grad(value(point), point, create_graph=True)
    return slope, point


def _row(slope: Tensor, point: Tensor, k: int) -> Tensor:
    """Of the Hessian."""
    if not slope.requires_grad:
        return torch.zeros_like(slope).flatten()
    (row,) = torch.autograd.grad(
        slope.flatten()[k], point, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return row.detach().flatten()


def _zeros(leaf: Any) -> Tensor:
    if not isinstance(leaf, Tensor):  # it could hold what the records hold
        raise TypeError
    return leaf.new_zeros((1, *leaf.shape[1:]))
