"""Does a record's output depend on other records? The model is run on batches of made-up ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..clipping.nested import tensors_in
from .findings import MayFail, affordable, failing_as
from .forward_runs import are_finite, expected_of, record_axis, require_same, run, same_outputs
from .layer_kinds import FIX
from .made_up_records import KINDS, exchanged, groups_that_stay
from .model_state import ModelAsChecked
from .seeded_draws import SeededDraws
from .tried_model import FAILS, TriedModel

CANNOT_BE_RUN = (
    "the model cannot be run on two made-up records of shapes {}: {{}}. Pass example_inputs=, its"
    " arguments for two made-up records (no real ones)."
)
NOT_FINITE = (
    "the model's output on made-up records is not finite: pass example_inputs=, made-up records"
    " that the model can take"
)
_SEEDS = 64  # all of them miss a branch of probability 0.1 with probability 0.001
_FEWEST_SEEDS = 8


def check_independence(tried: TriedModel) -> ModelAsChecked:
    """Raise if a record's output depends on others; note how records draw.

    Returns:
        The model's state after its first pass, which may have filled caches.
    """
    module, inputs = tried.module, tried.inputs
    before = {name: t.detach().clone() for name, t in tried.tensors().items()}
    versions = [t._version for t in tensors_in(inputs)]
    with tried.source.paused():
        with failing_as(CANNOT_BE_RUN.format([list(t.shape) for t in tensors_in(inputs)])):
            first = run(module, inputs, SeededDraws()).outputs
        as_checked = ModelAsChecked(module, tried.source.passing_attributes, watch_passes=False)
        require_unchanged(module, before)
        are_changed = [t._version for t in tensors_in(inputs)] != versions
        if not first or any(t.dim() == 0 or len(t) != 2 for t in first):
            raise ValueError(
                "the model's output must be a tensor with one row per record in dimension 0 (a loss"
                " computed inside the model mixes records)"
            )
        if not are_finite(first):
            raise ValueError(NOT_FINITE)
        if not same_outputs(first, run(module, inputs, SeededDraws()).outputs):
            if are_changed:
                raise ValueError(
                    f"the forward pass of {type(module).__name__!r} changes its input in place, so"
                    " that it gives another output on the same records: write x = x * 2 instead of"
                    " x *= 2."
                )
            raise ValueError(
                "the model gives another output when it is run again on the same records: keep"
                " nothing between forward passes, and draw with torch's own generator."
            )
        draws, several = SeededDraws(), SeededDraws()
        with failing_as(
            "the model fails on a batch of one record, which Poisson sampling delivers:"
            f" {{}}. {FIX}"
        ):
            tried.alone = run(module, tried.given(0), draws)
        tried.run_given(tried.large, several)
        if len(draws.shapes) == len(several.shapes):  # else they draw one after another
            tried.axes = [
                record_axis(s, t, tried.large)
                for s, t in zip(draws.shapes, several.shapes, strict=True)
            ]
            tried.is_aligned = not several.is_elsewhere
        _require_unmoved(tried)
        require_same_alone(tried, tried.sizes)
    require_unchanged(module, before)
    return as_checked


def require_unchanged(module: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Raise if a forward pass wrote into buffers or parameters."""
    for name, t in [*module.named_buffers(), *module.named_parameters()]:
        if name in before and torch.equal(t, before[name]):
            continue
        owner = name.rpartition(".")[0]
        what = (
            f"module {owner or type(module).__name__!r} changes its buffer or parameter {name!r} in"
            " the forward pass"
        )
        layer = module.get_submodule(owner)
        if any(
            type(part).__name__ in ("SpectralNorm", "_SpectralNorm")
            for part in [layer, *layer._forward_pre_hooks.values()]
        ):
            raise ValueError(
                f"{what}: the power iteration of spectral_norm, which moves on at every call. Take"
                " it off by remove_spectral_norm or parametrize.remove_parametrizations, and bound"
                " the weight after optimizer.step(), which costs no privacy."
            )
        raise ValueError(
            f"{what}: statistics of the records would leave without noise. Keep them out of the"
            f" module. {FIX}"
        )


def require_same_alone(tried: TriedModel, sizes: Sequence[int]) -> None:
    """Raise if a record's output depends on how many others there are or on its place among them,
    in batches of such ``sizes``. All records draw the same random numbers here; those after the
    first one draw what they would alone only where draws are aligned.
    """

    def draws() -> SeededDraws:
        return SeededDraws(0, tried.axes, are_alike=True)

    singles = [run(tried.module, tried.given(k), draws()) for k in range(2)]
    for rows in sizes:
        together = tried.run_given(rows, draws(), singles[0])
        places = torch.arange(rows)
        for k, single in enumerate(singles[: 2 if tried.is_aligned else 1]):
            keep = places % 2 == k if tried.is_aligned else places == 0
            expected = expected_of(single, together, rows)
            require_same(tried.module, expected, together, keep, tried.rounding)


def _require_unmoved(tried: TriedModel) -> None:
    """Raise if other values of the other records move what happens to a record, under the
    same random numbers, or other numbers of theirs.
    """
    first_kinds, later_kinds = KINDS[:2], KINDS[2:]
    batches = [
        (tried.middle, KINDS),
        (tried.large, (*later_kinds, *first_kinds)),
        (2, first_kinds),
    ]
    trials = [
        (seed, rows, kind)
        for seed, (rows, kind) in enumerate((rows, kind) for rows, some in batches for kind in some)
    ]
    is_random = False
    for seed, rows, kind in affordable(trials, len(KINDS), lambda trial: trial[1]):
        is_random |= _compare(tried, rows, kind, seed, groups_that_stay(rows))
    for seed in affordable(range(_SEEDS if is_random else 0), _FEWEST_SEEDS):
        rows = (2, tried.middle)[seed // 2 % 2]
        keep = groups_that_stay(rows)[seed // 4 % len(groups_that_stay(rows))]
        draws_apart = tried.is_aligned and seed // 2 % 2 == 1
        _compare(tried, rows, KINDS[seed % 2], len(trials) + seed, [keep], draws_apart)


def _compare(
    tried: TriedModel,
    rows: int,
    kind: str,
    seed: int,
    kept: Sequence[Tensor],
    draws_apart: bool = False,
) -> bool:
    """One batch, in which those in each of ``kept`` stay and all others are exchanged, with what
    they draw where records draw apart. Returns whether random numbers were drawn.
    """
    base, others = tried.neighbours(rows, kind, seed)
    nobody = torch.zeros(rows, dtype=torch.bool) if draws_apart else None
    draws = SeededDraws(seed, tried.axes, others=nobody)
    first = None
    with failing_as(FAILS.format(rows)) if kind in KINDS[:2] else MayFail():
        tried.try_on_cpu(base)
        first = tried.run(base, draws)
    if first is None:
        return False
    for keep in kept:
        mixed = exchanged(base, others, keep)
        with MayFail() as running:
            tried.try_on_cpu(mixed)
            others_draw = SeededDraws(seed, tried.axes, others=~keep if draws_apart else None)
            second = tried.run(mixed, others_draw)
        if not running.failed:
            are_copies = kind == "copies"
            require_same(tried.module, first, second, keep, are_copies=are_copies)
    return draws.is_random
