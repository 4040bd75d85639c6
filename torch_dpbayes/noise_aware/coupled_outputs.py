"""Whether a loss makes the outputs of a record depend on each other, as that of a softmax does."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..mcmc.density.pyro_runs import public_randomness
from ..ops.models import Loss

_SEEN = 1e-6  # of the row's largest entry


def couples_outputs(module: nn.Module, loss: Loss, inputs: Any, targets: Any) -> bool:
    """Whether the first row of the loss's Hessian in a record's outputs has entries off the
    diagonal. Then so does the curvature of the parameters, whatever the records are.

    It is asked of one record of zeros however many there are, so that nothing of the data is in the
    answer; False where module or loss do not take one, or records are not tensors.

    Args:
        module, loss, inputs, targets: as for
            :func:`~torch_dpbayes.noise_aware.laplace_for_module`.
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
        with torch.enable_grad():
            # apart from each other: at equal outputs some losses have a corner
            steps = torch.linspace(0, 1, found.numel(), dtype=found.dtype, device=found.device)
            outputs = (found + steps.reshape(found.shape)).requires_grad_()
            value = loss(outputs, nothing(targets)).sum()
            (slope,) = torch.autograd.grad(value, outputs, create_graph=True)
            if not slope.requires_grad:
                return False
            (row,) = torch.autograd.grad(slope.flatten()[0], outputs, allow_unused=True)
    except Exception:  # of whatever kind: nothing but a warning depends on it
        return False
    if row is None:
        return False
    entries = row.flatten().abs()
    return bool((entries[1:] > _SEEN * entries.max()).any())
