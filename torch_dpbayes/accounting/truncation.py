"""Poisson batches of which at most a fixed number of records is used.

A draw of more than ``m`` records is cut to ``m`` of them, chosen at random. Let M ~ Binomial(n, q)
be how many other records are drawn. If M < m, the record joins with probability q and displaces
nobody: a Poisson-sampled sum. If M >= m, it is in the batch with probability q' = E[q m / (M + 1) |
M >= m] and then takes the place of another one, so that the sum moves by up to 2C. Which of the two
it is may be told, and so may the batch without the record: given that it is full it does not
depend on M.
"""

from __future__ import annotations

import numpy as np
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent
from scipy import special, stats

from . import events, loss_grid, pairs, renyi
from .events import DpEvent, GaussianDpEvent, Parts, PoissonSampledDpEvent
from .pairs import Array, Gaussian, Mixed, Pair, Sampled, SampledKind

_ROUND_OFF = 1e-12  # relative, of a binomial probability


@events.parts_of.register
def _(event: TruncatedSubsampledGaussianDpEvent, count: int) -> Parts:
    size = events.positive_count(event.dataset_size, "dataset_size")
    most = events.positive_count(event.truncated_batch_size, "truncated_batch_size")
    gaussian = GaussianDpEvent(events.gaussian_noise_multiplier(event.noise_multiplier))
    plain = PoissonSampledDpEvent(event.sampling_probability, gaussian)
    for sampled, _ in events.parts_of(plain, count):  # nothing at rate 0
        assert isinstance(sampled, PoissonSampledDpEvent)
        rate, noise = sampled.sampling_probability, gaussian.noise_multiplier
        # one record more may be there than was stated
        if most > size:
            yield sampled, count
        else:
            yield TruncatedSubsampledGaussianDpEvent(size, rate, most, noise), count


@events.lowered.register
def _(event: TruncatedSubsampledGaussianDpEvent, slack: float) -> DpEvent:
    gaussian = events.lowered(GaussianDpEvent(event.noise_multiplier), slack)
    return TruncatedSubsampledGaussianDpEvent(
        event.dataset_size,
        event.sampling_probability,
        event.truncated_batch_size,
        gaussian.noise_multiplier,
    )


def _displacing(others: int, rate: float, most: int) -> tuple[float, float]:
    """P(M >= m) and q', both rounded up."""
    probability = float(stats.binom.sf(most - 1, others, rate))
    if probability < 1e-290:
        return 1e-290, rate
    joins = most / (others + 1) * float(stats.binom.sf(most, others + 1, rate)) / probability
    return min(probability * (1 + _ROUND_OFF), 1.0), min(joins * (1 + _ROUND_OFF), rate)


@pairs.pair_of.register
def _(event: TruncatedSubsampledGaussianDpEvent, replace: bool) -> Pair:
    size, most = event.dataset_size, event.truncated_batch_size
    rate, noise = event.sampling_probability, event.noise_multiplier
    if not isinstance(pairs.sampled_pair("directed", 0.5, noise / 2), Sampled):
        return Gaussian(2.0 / noise)
    if rate == 1:
        return Gaussian(2.0 / noise)
    full, joins = _displacing(size - 1, rate, most)
    parts: list[tuple[float, SampledKind, float, float]]
    if replace:
        parts = [(1 - full, "antipodal", rate, noise), (full, "symmetric", joins, noise / 2)]
    else:
        # A record may also be added to the stated number: the batch is full a little more often
        # then. What lies between costs no more than a swap at the full rate.
        fuller = max(_displacing(size, rate, most)[0], full)
        parts = [
            (1 - fuller, "directed", rate, noise),
            (full, "directed", joins, noise / 2),
            (fuller - full, "directed", rate, noise / 2),
        ]
    return Mixed(tuple((weight, Sampled(kind, q, z)) for weight, kind, q, z in parts if weight > 0))


@loss_grid.loss_nodes.register
def _(pair: Mixed, tail: float, interval: float | None = None) -> loss_grid.Nodes:
    found = [(weight, loss_grid.loss_nodes(part, tail, interval)) for weight, part in pair.parts]
    return loss_grid.Nodes(
        np.concatenate([nodes.losses for _, nodes in found]),
        np.concatenate([weight * nodes.masses for weight, nodes in found]),
        sum(weight * nodes.central for weight, nodes in found),
    )


@renyi.divergences.register
def _(pair: Mixed, alpha: Array) -> Array:
    terms = [
        np.log(weight) + (alpha - 1) * renyi.divergences(part, alpha) for weight, part in pair.parts
    ]
    return np.asarray(np.maximum(special.logsumexp(terms, axis=0), 0.0) / (alpha - 1))


@pairs.dominating_mu.register
def _(pair: Mixed) -> float:
    return max(pairs.dominating_mu(part) for _, part in pair.parts)
