"""A bounded set of samples, which selects the iterates of a run to keep."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ArgumentError, DivergedError, SamplesError, StateError
from . import files, outputs
from .outputs import Sample, require_same_buffers


class Chain:
    """A bounded set of samples."""

    def __init__(self, burn_in: int | None = None, thin: int = 1, max_samples: int = 100) -> None:
        counts = (("burn_in", burn_in or 0, 0), ("thin", thin, 1), ("max_samples", max_samples, 2))
        for name, value, smallest in counts:
            if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
                raise ArgumentError(
                    f"{name} must be an integer, at least {smallest} (collect() calls), got"
                    f" {value!r}."
                )
        self.burn_in, self.thin, self.max_samples = burn_in, thin, max_samples
        self._num_collected = 0
        self._samples: list[Sample] = []
        self._buffers: dict[str, Tensor] | None = None

    def __len__(self) -> int:
        return len(self._samples)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self)} samples of {self._num_collected} collect() calls, "
            f"burn_in={self.burn_in}, thin={self.thin}, max_samples={self.max_samples})"
        )

    @property
    def num_collected(self) -> int:
        """The number of calls of :meth:`collect`, including discarded ones."""
        return self._num_collected

    @torch.no_grad()
    def collect(self, model: nn.Module) -> None:
        """Counts a call and, if a sample is due, keeps a copy of the model's trainable parameters
        (same device and dtype). You may call it after every step: calls without a sample are fast.

        Args:
            model: the network, as it is after the optimizer's last step.

        Raises:
            ValueError: the model has no trainable parameter, other parameters than at the first
                call, or a buffer that changed. The call is then not counted.
            DivergedError: a parameter is not finite.
            StateError: no batch was taken from the private loader since ``make_private``.

        **Privacy**: post-processing of the released iterate, no charge. Buffers must not have
        changed since the first batch of the private loader (for other models: since the first
        call).
        """
        start = None if self._samples else getattr(model, "_dpbayes_start", None)
        if start and start == [(id(p), p._version) for p in model.parameters() if p.requires_grad]:
            raise StateError(
                "no batch was taken since make_private, so the parameters are not a sample of"
                " the posterior: collect after an optimizer's step."
            )
        if not hasattr(model, "_dpbayes_buffers") and self._buffers is None:
            buffers = model.named_buffers(remove_duplicate=False)
            self._buffers = {name: b.detach().clone() for name, b in buffers}
        number = self._num_collected - (self.burn_in or 0)
        if number < 0 or number % self.thin:
            self._num_collected += 1
            return
        parameters = _checked_parameters(model, self.shapes())
        require_same_buffers(model, self._buffers)

        self._num_collected += 1
        # due calls have the places 0, 1, ...; without burn_in the first half is dropped
        place = number // self.thin
        if self.burn_in is None:
            half = (place + 1) // 2
            del self._samples[: max(0, len(self._samples) - (place - half))]
        if len(self._samples) == self.max_samples:
            oldest = place - self.max_samples
            self._samples = self._samples[oldest % 2 :: 2]
            self.thin *= 2
            if number % self.thin:
                return
        self._samples.append({name: p.detach().clone() for name, p in parameters.items()})

    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the parameters that are sampled; empty before the first sample."""
        return {name: p.shape for name, p in self._samples[0].items()} if self._samples else {}

    def draws_of(self, name: str) -> np.ndarray[Any, Any]:
        """All samples of one parameter, one row each."""
        return np.stack([files.array_of(sample[name]) for sample in self._samples])

    def to_arviz(self, *other_chains: Self) -> Any:
        r"""The samples as ArviZ's data structure, for effective sample size, :math:`\hat R` and
        trace plots: ``arviz.summary(first.to_arviz(second, third))``.

        Each parameter is a variable of the group ``posterior`` under its own name, ``[chain, draw,
        ...]``. :math:`\hat R` compares chains that were run independently, at least two. It counts
        permuted hidden units as different parameters; predictions (:meth:`outputs`) avoid this.

        Args:
            other_chains: samples of the same parameters from other runs: equally many, with the
                same ``thin``.

        Returns:
            ``arviz.InferenceData``; with ArviZ 1 or later an ``xarray.DataTree``.

        Raises:
            ValueError: a chain has no sample, other parameters, another length or spacing.

        **Privacy**: post-processing. Each chain is a training run with its own charges. If you
        decide by these figures whether to run longer, this is an adaptive choice (see
        :class:`~torch_dpbayes.PrivacyAccountant`).
        """
        chains, shapes = (self, *other_chains), self.shapes()
        if taken := shapes.keys() & {"chain", "draw"}:
            raise SamplesError(
                f"A parameter is called {taken.pop()!r}, which ArviZ uses for a dimension and"
                " drops: rename it in the model."
            )
        first = (shapes, len(self), self.thin)
        for number, chain in enumerate(chains, 1):
            is_empty = not isinstance(chain, Chain) or not len(chain)
            if is_empty or (chain.shapes(), len(chain), chain.thin) != first:
                raise SamplesError(
                    f"chain {number}, {chain!r}, differs from the first one, {self!r}: pass runs of"
                    " one model with the same burn_in, thin, max_samples and number of collect()"
                    " calls."
                )
        return files.arviz_of({n: np.stack([c.draws_of(n) for c in chains]) for n in shapes})


def _checked_parameters(model: nn.Module, before: dict[str, torch.Size]) -> dict[str, nn.Parameter]:
    """The trainable parameters; raises if their shapes changed or one of them is not finite."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    shapes = {name: p.shape for name, p in parameters.items()}
    if not parameters:
        raise SamplesError("The model has no trainable parameter to collect.")
    if before and shapes != before:
        raise SamplesError(
            "This model has other trainable parameters than the model collected before:"
            f" {outputs.difference_of(before, shapes)}. Use one PosteriorSamples for one model."
        )
    for name, p in parameters.items():
        if not torch.isfinite(p).all():
            raise DivergedError(
                f"Parameter {name!r} is not finite: the chain diverged, usually because lr is too"
                " large. This sample was not collected; restart with a smaller lr."
            )
    return parameters
