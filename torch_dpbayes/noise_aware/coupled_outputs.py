"""Whether a loss makes the outputs of a record depend on each other, as that of a softmax does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..mcmc.density.pyro_runs import public_randomness
from ..ops.models import Loss
from .turned import Turn

_SEEN = 1e-6  # of the row's largest entry
_LITTLE = 1e-2  # of the diagonal's largest entry: far above any rounding


def couples_outputs(
    module: nn.Module, loss: Loss, inputs: Any, targets: Any, turned: Sequence[Tensor] = ()
) -> bool:
    """Whether the first row of the loss's Hessian in a record's outputs has entries off the
    diagonal, which contrasts of the outputs do not remove. Then so does the curvature of the
    parameters, whatever the records are.

    It is asked of one record of zeros however many there are, so that nothing of the data is in the
    answer; False where module or loss do not take one, or records are not tensors.

    Args:
        module, loss, inputs, targets: as for
            :func:`~torch_dpbayes.noise_aware.laplace_for_module`.
        turned: places ``[K, m]`` of the latents that are in contrasts
            (:mod:`~torch_dpbayes.noise_aware.turned`). Where K is the number of outputs, these may
            be the last layer's.
    """

    def nothing(leaf: Any) -> Tensor:
        if not isinstance(leaf, Tensor):  # it could hold what the records hold
            raise TypeError
        return leaf.new_zeros((1, *leaf.shape[1:]))

    try:
        with torch.no_grad():
            net = deepcopy(module).eval()
            for p in net.parameters():  # trained ones may have been fitted to the records before
                if p.requires_grad:
                    p.zero_()
            with public_randomness():
                found = net(pytree.tree_map(nothing, inputs))
        one = nothing(targets)

        def slope(outputs: Tensor) -> Tensor:
            value = loss(outputs, one).sum()
            (gradient,) = torch.autograd.grad(value, outputs, create_graph=True)
            return gradient

        with torch.enable_grad():
            # apart from each other: at equal outputs some losses have a corner
            steps = torch.linspace(0, 1, found.numel(), dtype=found.dtype, device=found.device)
            outputs = (found + steps.reshape(found.shape)).requires_grad_()
            gradient = slope(outputs)
            if not gradient.requires_grad:
                return False
            (row,) = torch.autograd.grad(gradient.flatten()[0], outputs, allow_unused=True)
            if row is None:
                return False
            entries = row.flatten().abs()
            if not (entries[1:] > _SEEN * entries.max()).any():
                return False
            counts = {len(places) for places in turned}
            return not any(
                found.shape[dim] in counts and _are_contrasts_apart(slope, found, dim)
                for dim in range(1, found.dim())
            )
    except Exception:  # of whatever kind: nothing but a warning depends on it
        return False


def _are_contrasts_apart(slope: Callable[[Tensor], Tensor], outputs: Tensor, dim: int) -> bool:
    """Whether M, the Hessian at outputs of 0 in contrasts along a dimension of theirs, is about
    diagonal, and 0 in what outputs have in common: elsewhere the last layer is not turned.

    M is diagonal if M·z = (M·1)∘z for a z that is drawn at random. NaN is no.
    """
    places = torch.arange(outputs.numel(), device=outputs.device).reshape(outputs.shape)
    places = places.movedim(dim, 0).flatten(1)
    zeros = torch.zeros_like(outputs)
    turn = Turn([places], zeros.flatten() == 0, zeros.flatten())
    point = zeros.requires_grad_()
    gradient = slope(point).flatten()

    def of_hessian(z: Tensor) -> Tensor:
        (product,) = torch.autograd.grad(gradient, point, turn.of(z), retain_graph=True)
        return turn.of(product.flatten())

    diagonal = of_hessian(torch.ones_like(gradient))
    with public_randomness():
        z = torch.randn_like(gradient)
    away = (of_hessian(z) - diagonal * z).abs()
    most = _LITTLE * diagonal.abs().max()
    return bool((away < most).all()) and bool((diagonal[places[0]].abs() < most).all())
