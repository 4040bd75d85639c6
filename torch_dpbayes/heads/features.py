"""Features of records, each made of its own record alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Forward = Callable[[nn.Module, Any], Any]

_MADE_UP = 4  # records
_SAME = 1e-3  # of the largest feature: rounding of other batch sizes stays far below


def group_normalised(features: Tensor, groups: int, eps: float = 1e-5) -> Tensor:
    r"""Every record's features with mean 0 and variance 1 within each group of its channels.

    .. math:: (x - \mathrm{mean}_g(x)) / \sqrt{\mathrm{var}_g(x) + \epsilon}

    Mean and variance are the record's own, over the channels of group g and all positions (Wu and
    He, 2018, "Group normalization"). A mean over *records*, as in whitening, standardisation of
    columns or principal components, would be computed from everybody's: take those of public data.

    Args:
        features: ``[n, channels, ...]``.
        groups: how many; divides the number of channels.
        eps: ε, so that constant features become 0.

    Returns:
        A tensor of the same shape.

    Raises:
        ValueError: ``groups`` does not divide the channels, or a group is a single number.

    **Privacy.** None is spent: a record's result is a function of this record alone.
    """
    channels = features.shape[1] if features.dim() > 1 else 0
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1 or channels % groups:
        raise ValueError(
            f"groups must be a whole number that divides the {channels} channels in dimension 1,"
            f" got {groups!r}."
        )
    if len(features) and features[0].numel() <= groups:
        raise ValueError("each group is a single number, which would become 0: use fewer groups.")
    # no weight and no bias; positions as one dimension, for half precision is not taken otherwise
    return nn.functional.group_norm(features.flatten(2), groups, eps=eps).reshape(features.shape)


@torch.no_grad()
def frozen_features(
    network: nn.Module,
    inputs: Any,
    *,
    forward: Forward | None = None,
    batch_size: int = 256,
) -> Tensor:
    """What a pretrained network makes of each record: the features of a private last layer.

    The network is run in eval mode without gradients, batch by batch, and left as it was. Of a
    classifier take off the last layer first: ``net.fc = torch.nn.Identity()`` (torchvision),
    ``timm.create_model(..., num_classes=0)``, or ``forward=lambda net, batch:
    net(**batch).last_hidden_state[:, 0]`` (transformers).

    Args:
        network: a model whose weights are public.
        inputs: a tensor ``[n, ...]``, or a dict of such tensors, which the network gets by name.
        forward: ``(network, batch) -> [rows, ...]`` where the network returns no tensor.
        batch_size: records that are run at a time.

    Returns:
        ``[n, d]`` on the inputs' device, flattened.

    Raises:
        ValueError: a made-up record's features depend on the other records of its batch.
        TypeError: the inputs or the output are of another kind.

    **Privacy.** None is spent, if the network was not trained on the private records and no record
    changes another one's features. The latter is tried on four made-up records, which a network
    that mixes others can pass.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if not isinstance(inputs, Tensor | dict) or not leaves or any(t.dim() == 0 for t in leaves):
        raise TypeError(
            "inputs must be a tensor [n, ...] or a dict of such tensors; for a DataLoader write"
            " torch.cat([frozen_features(net, x) for x, _ in loader]), unshuffled."
        )
    if len({len(t) for t in leaves}) > 1:
        raise ValueError("the tensors of inputs have different numbers of records in dimension 0.")
    device = next((p.device for p in network.parameters()), leaves[0].device)

    def run(batch: Any) -> Tensor:
        batch = pytree.tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, batch)
        if forward is not None:
            output = forward(network, batch)
        else:
            output = network(**batch) if isinstance(batch, dict) else network(batch)
        if not isinstance(output, Tensor):
            raise TypeError(
                f"the network returned a {type(output).__name__}: pass forward=lambda net, batch:"
                " net(**batch).last_hidden_state[:, 0], or alike."
            )
        return output

    with _eval_mode(network):
        _require_apart(run, inputs)
        found = [
            run(_rows(inputs, slice(start, start + batch_size))).flatten(1).to(leaves[0].device)
            for start in range(0, len(leaves[0]), batch_size)
        ]
    if not found:
        raise ValueError("inputs has no record.")
    return torch.cat(found)


def _rows(inputs: Any, rows: slice) -> Any:
    return pytree.tree_map(lambda t: t[rows] if isinstance(t, Tensor) else t, inputs)


def _require_apart(run: Callable[[Any], Tensor], inputs: Any) -> None:
    """Raise if made-up records of the shapes of ``inputs`` fare otherwise together than alone."""
    source = torch.Generator().manual_seed(0)  # the caller's own stays where it is

    def made_up(like: Any) -> Any:
        if not isinstance(like, Tensor):
            return like
        shape = (_MADE_UP, *like.shape[1:])
        if like.is_floating_point():
            return torch.randn(shape, generator=source).to(like)
        # token numbers and masks alike; the first position is kept, for a mask of nothing is none
        bits = torch.randint(0, 2, shape, generator=source)
        bits[(slice(None),) + (0,) * (bits.dim() - 1)] = 1
        return bits.to(like)

    batch = pytree.tree_map(made_up, inputs)
    together = run(batch)
    if together.dim() == 0 or len(together) != _MADE_UP:
        raise ValueError(
            f"{_MADE_UP} records went in and {list(together.shape)} came out: the features must"
            " have one row a record in dimension 0."
        )
    alone = torch.cat([run(_rows(batch, slice(k, k + 1))) for k in range(_MADE_UP)])
    size = float(together.nan_to_num().abs().max()) + 1e-30
    if not torch.allclose(together, alone, rtol=0, atol=_SAME * size, equal_nan=True):
        raise ValueError(
            "a record's features depend on the other records of its batch: use a network without"
            " statistics over the batch, or one whose statistics are fixed in eval mode."
        )


@contextmanager
def _eval_mode(network: nn.Module) -> Any:
    modes = [(module, module.training) for module in network.modules()]
    try:
        network.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training
