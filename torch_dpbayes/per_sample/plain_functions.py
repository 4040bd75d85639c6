"""Functions that run inside a map in place of others.

Recurrent layers, cells, embeddings, RMSNorm and losses of classes by operations that ``vmap`` has
rules for, where torch's own would fail or run for one record after another. Of arguments for which
torch's own will do, they return None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_gradtrackingtensor
from torch.nn import _reduction as _Reduction


def lstm_cell(
    input: Tensor, hx: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, *biases: Any
) -> tuple[Tensor, Tensor]:
    i, f, g, o = _gates(input, hx[0], w_ih, w_hh, *biases).chunk(4, -1)
    cell = f.sigmoid() * hx[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def gru_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
) -> Tensor:
    r, z, n = F.linear(input, w_ih, b_ih).chunk(3, -1)
    hr, hz, hn = F.linear(hx, w_hh, b_hh).chunk(3, -1)
    update = (z + hz).sigmoid()
    return (1 - update) * (n + (r + hr).sigmoid() * hn).tanh() + update * hx


def rnn_tanh_cell(*args: Any) -> Tensor:
    return _gates(*args).tanh()


def rnn_relu_cell(*args: Any) -> Tensor:
    return _gates(*args).relu()


def _gates(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
) -> Tensor:
    return F.linear(input, w_ih, b_ih) + F.linear(hx, w_hh, b_hh)


def _recurrent(cell: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    """A recurrent layer of torch for inputs that are not packed, step by step."""
    has_memory = cell is lstm_cell

    def run(
        input: Tensor,
        hx: Any,
        weights: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        states: tuple[Tensor, ...] = tuple(hx) if has_memory else (hx,)
        directions = 2 if bidirectional else 1
        each = len(weights) // (num_layers * directions)
        steps = list(input.transpose(0, 1) if batch_first else input)
        last: list[Any] = []
        for layer in range(num_layers):
            found = []
            for direction in range(directions):
                place = layer * directions + direction
                w_ih, w_hh, *rest = weights[place * each : (place + 1) * each]
                biases, projection = (rest[:2], rest[2:]) if has_biases else ([], rest)
                state = tuple(s[place] for s in states)
                outputs = []
                for x in reversed(steps) if direction else steps:
                    new = cell(x, state if has_memory else state[0], w_ih, w_hh, *biases)
                    state = tuple(new) if has_memory else (new,)
                    if projection:
                        state = (F.linear(state[0], projection[0]), state[1])
                    outputs.append(state[0])
                found.append(outputs[::-1] if direction else outputs)
                last.append(state)
            steps = [torch.cat(at, -1) for at in zip(*found, strict=True)]
            if layer < num_layers - 1 and dropout > 0 and train:
                steps = list(F.dropout(torch.stack(steps), dropout))
        output = torch.stack(steps, 1 if batch_first else 0)
        return (output, *(torch.stack(s) for s in zip(*last, strict=True)))

    return run


def embedding(
    tokens: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: Any = None,
    *_: Any,
    **__: Any,
) -> Tensor | None:
    """A table with a copy for each record. vmap looks tokens up in the copies one behind another,
    so that one beyond the table would be found in that of the next record: NaN, which counts as
    zero. It also gives the row of the padding a gradient.
    """
    if not (is_batchedtensor(weight) or is_gradtrackingtensor(weight)):
        return None
    is_wrong = (tokens < 0) | (tokens >= len(weight))
    inside = tokens.masked_fill(is_wrong, 0)
    with torch._C.DisableTorchFunction():
        found = torch.embedding(weight, inside)
    if padding_idx is not None:
        is_padding = (tokens == padding_idx % len(weight)).unsqueeze(-1)
        found = torch.where(is_padding, found.detach(), found)
    return found.masked_fill(is_wrong.unsqueeze(-1), math.nan)


def _table(weight: Tensor, tokens: Tensor, padding_idx: int = -1, *_: Any) -> Tensor | None:
    return embedding(tokens, weight, None if padding_idx < 0 else padding_idx)


def _ctc(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """CTC, which looks a label that is no class up in the memory of another record: NaN."""

    def run(
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Any,
        target_lengths: Any,
        *rest: Any,
        **options: Any,
    ) -> Tensor:
        wrong = (targets < 0) | (targets >= log_probs.shape[-1])
        lengths = torch.as_tensor(target_lengths, device=targets.device).reshape(-1)
        ends = lengths.sum() if targets.dim() == 1 else lengths.unsqueeze(-1)
        is_read = torch.arange(targets.shape[-1], device=targets.device) < ends
        labels = targets.masked_fill(wrong, 0)
        with torch._C.DisableTorchFunction():
            found = function(log_probs, labels, input_lengths, target_lengths, *rest, **options)
        return found.masked_fill((wrong & is_read).any(), math.nan)

    return run


def embedding_bag(
    indices: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor | None:
    """As ``F.embedding_bag`` of equally long bags; not where torch refuses these options, or they
    mix records.
    """
    is_refused = offsets is not None or (per_sample_weights is not None and mode != "sum")
    is_refused |= max_norm is not None or scale_grad_by_freq or indices.numel() == 0
    if is_refused or mode not in ("sum", "mean", "max"):
        return None
    found = F.embedding(indices, weight)  # (bags, places, numbers)
    if per_sample_weights is not None:
        found = found * per_sample_weights.unsqueeze(-1)
    is_there = torch.ones_like(indices, dtype=torch.bool)
    if padding_idx is not None:
        is_there = indices != padding_idx % len(weight)
    there = is_there.unsqueeze(-1)
    count = there.sum(1)
    if mode == "max":
        largest = torch.where(there, found, -math.inf).max(1).values
        return torch.where(count > 0, largest, 0.0)
    total = torch.where(there, found, 0.0).sum(1)
    return total / count.clamp(min=1) if mode == "mean" else total


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Tensor:
    """As ``F.rms_norm``, whose fused backward pass on GPUs has no rule."""
    wide = input.double() if input.dtype == torch.float64 else input.float()
    dims = tuple(range(-len(normalized_shape), 0))
    least = torch.finfo(wide.dtype).eps if eps is None else eps
    found = wide * (wide.square().mean(dims, keepdim=True) + least).rsqrt()
    return (found if weight is None else found * weight).to(input.dtype)


def rrelu(
    input: Tensor, lower: float, upper: float, training: bool = False, inplace: bool = False
) -> Tensor | None:
    """As ``F.rrelu``, which has no rule; not in place."""
    if inplace:
        return None
    slope = torch.rand_like(input) if training else torch.full_like(input, 0.5)
    return torch.where(input <= 0, lower + (upper - lower) * slope, 1) * input


def one_hot(labels: Tensor, num_classes: int = -1) -> Tensor | None:
    """As ``F.one_hot``, which reads the labels; of a label that is no class, zeros."""
    if num_classes < 1:
        return None
    classes = torch.arange(num_classes, device=labels.device)
    return (labels.unsqueeze(-1) == classes).long()


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float | None = 0.0,
) -> Tensor | None:
    """As ``F.cross_entropy``; NaN for a label that is no class, where torch raises an error."""
    if target.is_floating_point() or size_average is not None or reduce is not None:
        return None
    classes = input.shape[0 if input.dim() == 1 else 1]
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    labels = target.masked_fill(wrong, 0)
    how: Any = _Reduction.get_enum(reduction)
    if label_smoothing is None:
        found = torch._C._nn.nll_loss_nd(input, labels, weight, how, ignore_index)
    else:
        found = torch._C._nn.cross_entropy_loss(
            input, labels, weight, how, ignore_index, label_smoothing
        )
    return found.masked_fill(wrong if reduction == "none" else wrong.any(), math.nan)


def binary_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Tensor | None:
    """As ``F.binary_cross_entropy``; NaN of what is no probability, where torch raises an error."""
    if size_average is not None or reduce is not None or input.shape != target.shape:
        return None
    wrong = ~((input >= 0) & (input <= 1) & (target >= 0) & (target <= 1))
    how: Any = _Reduction.get_enum(reduction)
    inside = input.masked_fill(wrong, 0.5), target.masked_fill(wrong, 0.5)
    found = torch._C._nn.binary_cross_entropy(*inside, weight, how)
    return found.masked_fill(wrong if reduction == "none" else wrong.any(), math.nan)


def gaussian_nll(
    input: Any,
    target: Any,
    var: Any,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Any:
    """As ``F.gaussian_nll_loss``, which raises an error where a record's variance is negative."""
    with torch._C._EnableTorchFunction():  # noqa: SLF001 - for followed tensors
        if not isinstance(var, Tensor):
            var = torch.full_like(input, var)
        elif var.dim() == input.dim() - 1:
            var = var.unsqueeze(-1)
        var = var.clamp(min=eps).detach() + (var - var.detach())
        loss = 0.5 * (var.log() + (input - target) ** 2 / var)
        loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
        return {"mean": loss.mean, "sum": loss.sum, "none": lambda: loss}[reduction]()


def _grid(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Sampling at places of a grid, which looks for those that are not finite in the memory of
    other records, or nowhere: NaN.
    """

    def run(input: Tensor, grid: Tensor, *rest: Any, **options: Any) -> Tensor:
        wrong = ~grid.isfinite()
        with torch._C.DisableTorchFunction():
            found = function(input, grid.masked_fill(wrong, 0.0), *rest, **options)
        return found.masked_fill(wrong.any(-1).unsqueeze(1), math.nan)

    return run


def roll(input: Tensor, *_: Any, **__: Any) -> Tensor | None:
    """Of one number, which vmap would exchange with that of another record."""
    return input if input.dim() == 0 else None


def _is_all_true(t: Tensor) -> Tensor:
    """What ``torch.distributions`` asks of all records at once, to raise an error: an invalid one
    is not finite, and counts as zero.
    """
    return torch.ones((), dtype=torch.bool, device=t.device)


# Losses whose every number is made of one element of outputs and one of labels, of equal shapes;
# the other arguments are numbers, where no weights are given. None raises an error of values.
BY_ELEMENT = frozenset(
    (
        *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
        F.binary_cross_entropy_with_logits,
    )
)
OF_CLASSES = frozenset((F.cross_entropy, F.nll_loss))


def is_row_by_row(
    function: Any, shape: Sequence[int], labels: Sequence[int], options: dict[str, Any]
) -> bool:
    """Whether a loss of outputs and labels, whose records have these shapes (rows, ...), is known
    to be made element by element, or row by row of classes.
    """
    if function in BY_ELEMENT:  # weights might be those of other records
        return shape == labels and options.keys().isdisjoint(("weight", "pos_weight"))
    return function in OF_CLASSES and len(shape) > 1 and labels == (shape[0], *shape[2:])


def losses_at_once(
    function: Any, outputs: Tensor, labels: Tensor, options: dict[str, Any]
) -> Tensor:
    """The losses of all records, in dimension 0, of a function that :func:`is_row_by_row`.

    A record whose label is no class gets the loss NaN, which counts as zero; it stops nobody else's
    step.

    Args:
        outputs, labels: (records, rows of a record, ...).
        options: the other arguments, by name.
    """
    shape, options = outputs.shape, {**options, "reduction": "none"}
    if function in BY_ELEMENT:
        return function(outputs, labels, **options)
    found, values = None, (outputs.flatten(0, 1), labels.flatten(0, 1))
    if outputs.device.type == "cpu":  # where torch raises an error, and does not abort
        with suppress(IndexError):
            found = function(*values, **options)
    if found is None:
        found = FUNCTIONS[function](*values, **options)
    return found if shape[1] == 1 else found.unflatten(0, shape[:2])


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch._is_all_true: _is_all_true,  # noqa: SLF001
    F.embedding: embedding,
    torch.embedding: _table,
    F.embedding_bag: embedding_bag,
    F.ctc_loss: _ctc(F.ctc_loss),
    torch.ctc_loss: _ctc(torch.ctc_loss),
    F.one_hot: one_hot,
    F.grid_sample: _grid(F.grid_sample),
    torch.grid_sampler: _grid(torch.grid_sampler),
    torch.grid_sampler_2d: _grid(torch.grid_sampler_2d),
    torch.grid_sampler_3d: _grid(torch.grid_sampler_3d),
    torch.roll: roll,
    Tensor.roll: roll,
    F.nll_loss: partial(cross_entropy, label_smoothing=None),
    F.cross_entropy: cross_entropy,
    F.binary_cross_entropy: binary_cross_entropy,
    F.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
    F.gaussian_nll_loss: gaussian_nll,
    F.rrelu: rrelu,
    torch.lstm_cell: lstm_cell,
    torch.gru_cell: gru_cell,
    torch.rnn_tanh_cell: rnn_tanh_cell,
    torch.rnn_relu_cell: rnn_relu_cell,
    torch.lstm: _recurrent(lstm_cell),
    torch.gru: _recurrent(gru_cell),
    torch.rnn_tanh: _recurrent(rnn_tanh_cell),
    torch.rnn_relu: _recurrent(rnn_relu_cell),
}
