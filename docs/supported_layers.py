"""The table of layers: each is given to ``make_private``, and the table says what it answered."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
from opacus import layers as opacus_layers
from opacus.grad_sample import GradSampleHooks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.per_sample.layers import KINDS


class _Model(nn.Module):
    """One layer, and a linear one on the numbers that it hands out for a record."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor], x: Tensor):
        super().__init__()
        self.layer, self._call = layer, call
        self.last = nn.Linear(call(layer, x).flatten(1).shape[1], 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self._call(self.layer, x).flatten(1))
        return out


def _plainly(layer: nn.Module, x: Tensor) -> Tensor:
    out = layer(x)
    return out[0] if isinstance(out, tuple) else out


def _to_itself(layer: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = layer(x, x, x)[0]
    return out


def _cases() -> Iterator[tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor], Tensor]]:
    rows, words = torch.randn(8, 4), torch.randint(0, 9, (8, 5))
    series, picture, volume = (torch.randn(8, 4, *[6] * n) for n in (1, 2, 3))
    sequence = torch.randn(8, 5, 4)
    yield nn.Linear(4, 3), _plainly, rows
    yield nn.Bilinear(4, 4, 3), lambda layer, x: layer(x, x), rows
    yield nn.Conv1d(4, 3, 3), _plainly, series
    yield nn.Conv2d(4, 3, 3), _plainly, picture
    yield nn.Conv3d(4, 3, 3), _plainly, volume
    yield nn.ConvTranspose2d(4, 3, 3), _plainly, picture
    yield nn.Embedding(9, 4), _plainly, words
    yield nn.EmbeddingBag(9, 4), _plainly, words
    yield nn.LayerNorm(4), _plainly, sequence
    yield nn.RMSNorm(4), _plainly, sequence
    yield nn.GroupNorm(2, 4), _plainly, picture
    yield nn.InstanceNorm2d(4, affine=True), _plainly, picture
    yield nn.BatchNorm1d(4), _plainly, rows
    yield nn.BatchNorm2d(4), _plainly, picture
    yield nn.PReLU(), _plainly, rows
    yield nn.MultiheadAttention(4, 2, batch_first=True), _to_itself, sequence
    yield nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), _plainly, sequence
    yield nn.RNN(4, 3, batch_first=True), _plainly, sequence
    yield nn.GRU(4, 3, batch_first=True), _plainly, sequence
    yield nn.LSTM(4, 3, batch_first=True), _plainly, sequence
    yield opacus_layers.DPRNN(4, 3, batch_first=True), _plainly, sequence
    yield opacus_layers.DPGRU(4, 3, batch_first=True), _plainly, sequence
    yield opacus_layers.DPLSTM(4, 3, batch_first=True), _plainly, sequence
    yield opacus_layers.DPMultiheadAttention(4, 2, batch_first=True), _to_itself, sequence


def _answer(
    layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor], x: Tensor
) -> tuple[str, str]:
    model = _Model(layer, call, x)
    try:
        _, optimizer, _ = dpb.PrivacyEngine().make_private(
            module=model,
            optimizer=partial(dpb.optim.DPSGLD, lr=0.1),
            data_loader=DataLoader(TensorDataset(x, torch.zeros(len(x))), batch_size=4),
            max_grad_norm=1.0,
            noise_multiplier=1.0,
        )
    except ValueError as refusal:
        return "no", str(refusal).split(", ", 2)[-1].replace("|", "\\|")
    return "yes", optimizer.independence.partition(",")[0]


def _way(layer: nn.Module) -> str:
    """How a layer's share in each record's gradient is computed by book-keeping."""
    if type(layer) in KINDS:
        return "its own kernel"
    if any(type(part) in KINDS for part in layer.modules()):
        return "kernels of the layers in it"
    if type(layer) in GradSampleHooks.GRAD_SAMPLERS:
        return "Opacus' sampler"
    return "`torch.func`"


def table() -> str:
    """Markdown: a row for each layer."""
    logging.getLogger("torch_dpbayes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*batching rule for aten", category=UserWarning)
    lines = ["| layer | trained privately | way | records are kept apart, or what to write |"]
    lines += ["|---|---|---|---|"]
    for layer, call, x in _cases():
        accepted, said = _answer(layer, call, x)
        package = "opacus.layers" if type(layer).__module__.startswith("opacus") else "nn"
        way = _way(layer) if accepted == "yes" else ""
        lines.append(f"| `{package}.{type(layer).__name__}` | {accepted} | {way} | {said} |")
    return "\n".join(lines)
