"""A model under test on made-up records."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..clipping.gradient_source import GradientSource
from ..clipping.nested import map_tensors, tensors_in
from .findings import failing_as
from .forward_runs import Forward, are_finite, run
from .made_up_records import (
    batch_sizes,
    given,
    map_rows,
    neighbours,
    output_of,
    repeated,
    rows_in,
    taken_apart,
)
from .precision import FLOAT32
from .seeded_draws import SeededDraws

_MANY = 2**25  # numbers in the per-record gradients of one batch
FAILS = "the model fails on a batch of {} made-up records: {{}}"


@dataclass
class TriedModel:
    """A model, and what is known of it so far.

    Attributes:
        module: the model, with ``source`` attached to it.
        source: where its per-record gradients come from.
        inputs: its arguments for two made-up records.
        alone: the run of one record.
        axes: for each draw of random numbers, the dimension of the records, where known.
        is_aligned: records draw in a batch what they would draw alone.
        rounding: ε of the type that batches of several sizes may differ by.
    """

    module: nn.Module
    source: GradientSource
    inputs: tuple[Any, ...]
    alone: Forward | None = None
    axes: list[int | None] = field(default_factory=list)
    is_aligned: bool = False
    rounding: float = FLOAT32

    def __post_init__(self) -> None:
        self.named = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in self.named]
        self.sizes = batch_sizes(self.inputs)
        self.middle, self.large = self.sizes[len(self.sizes) // 2], self.sizes[-1]

    @property
    def tolerance(self) -> float:
        """Relative, of gradients that other kernels compute."""
        return max(1e-3, 8 * self.rounding)

    def discard(self) -> None:
        """Forget what was recorded, and ordinary gradients."""
        self.source.discard(self.parameters)
        for p in self.parameters:
            p.grad = None

    def rows_for(self, most: int) -> int:
        """Records in a batch whose gradients are all instantiated."""
        return max(2, min(most, _MANY // max(1, sum(p.numel() for p in self.parameters))))

    def tensors(self) -> dict[str, Tensor]:
        return dict([*self.module.named_buffers(), *self.module.named_parameters()])

    @cached_property
    def on_cpu(self) -> dict[str, Tensor]:
        """What a model on a GPU has, on the CPU: there an index that is too large is an ordinary
        exception, and does not end the use of the GPU.
        """
        is_elsewhere = any(p.device.type == "cuda" for p in self.module.parameters())
        return {n: t.detach().cpu() for n, t in self.tensors().items()} if is_elsewhere else {}

    def try_on_cpu(self, *batches: tuple[Any, ...]) -> None:
        """Raise there what would raise on a GPU."""
        for arguments in batches if self.on_cpu else ():
            self._tried(arguments)

    def _tried(self, arguments: tuple[Any, ...]) -> Any:
        with torch.no_grad(), SeededDraws():
            if not self.on_cpu:
                return output_of(self.module, arguments)
            arguments = map_tensors(arguments, Tensor.cpu)
            positional, by_name = taken_apart(arguments)
            return torch.func.functional_call(self.module, self.on_cpu, positional, by_name)

    @cached_property
    def limits(self) -> list[int]:
        """For each tensor, the number below which the model takes any integer; 2 where integers
        would be out of place.
        """
        tables = {
            layer.num_embeddings
            for layer in self.module.modules()
            if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
        }
        widths = {n for t in rows_in(self.inputs) for n in t.shape[1:]}
        candidates = sorted({100_001, 256, *tables, *widths}, reverse=True)

        def takes(place: int, limit: int) -> bool:
            places = itertools.count()
            trial = map_rows(
                lambda t: torch.full_like(t, limit - 1) if next(places) == place else t, self.inputs
            )
            try:
                return are_finite(list(tensors_in(self._tried(trial))))
            except Exception:
                return False

        limits = []
        for place, t in enumerate(rows_in(self.inputs)):
            is_integer = not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)
            fitting = [
                n for n in candidates if is_integer and 2 < n <= torch.iinfo(t.dtype).max + 1
            ]
            limits.append(next((n for n in fitting if takes(place, n)), 2))
        return limits

    def neighbours(
        self, rows: int, kind: str, seed: int
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Made-up records and others that may take their places."""
        return neighbours(self.inputs, rows, kind, self.limits, seed)

    def given(self, *places: int) -> tuple[Any, ...]:
        """The records at ``places`` of ``inputs``."""
        return given(self.inputs, *places)

    def run(self, arguments: tuple[Any, ...], draws: SeededDraws) -> Forward:
        return run(self.module, arguments, draws, self.alone)

    def run_given(self, rows: int, draws: SeededDraws, alone: Forward | None = None) -> Forward:
        """The two records of ``inputs`` in turn, noted as ``alone`` was."""
        with failing_as(FAILS.format(rows)):
            return run(self.module, repeated(self.inputs, rows), draws, alone)
