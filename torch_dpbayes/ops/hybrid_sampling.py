"""Hybrid sampling: one posterior sample as the start of a private chain, both on one accountant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ..accounting.accountant import PrivacyAccountant, PrivacyBudgetExceeded
from ..accounting.calibration import noise_multiplier_for
from ..accounting.events import (
    ComposedDpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    positive_count,
)
from ..batches.poisson_loader import PoissonLoader
from ..engine.privacy_engine import PrivacyEngine
from ..errors import ArgumentError
from ..optim.base import PrivateOptimizer
from ..posterior import PosteriorSamples
from .certificates import Certificate
from .certificates.certificate import ROUND_UP
from .glm import GLM
from .one_posterior_sample import OnePosteriorSample, epsilon_with


class Hybrid(NamedTuple):
    """The releases of a hybrid run, and their cost."""

    module: nn.Module  # linear predictors of clipped features, in the chain's last state
    # states of the chain: samples.predict(module, x), of counts predict(module, x, torch.exp)
    samples: PosteriorSamples
    start: dict[str, Tensor]  # the posterior sample that the chain began with
    accountant: PrivacyAccountant
    guarantee: str  # of the start, in words


def hybrid(
    model: GLM,
    features: Tensor,
    targets: Tensor,
    *,
    certificate: Certificate,
    optimizer: Callable[..., PrivateOptimizer],
    epsilon: float,
    delta: float,
    epochs: int,
    batch_size: int,
    max_grad_norm: float = 1.0,
    start_share: float = 0.5,
    samples: PosteriorSamples | None = None,
    accountant: PrivacyAccountant | None = None,
    num_data: int | None = None,
) -> Hybrid:
    r"""One posterior sample, from which DP-SGLD, DP-SGHMC or DP-SGNHT continues: the start is
    already near the posterior (Wang, Fienberg and Smola 2015, Algorithm 3).

    Args:
        model: gives loss and prior of start and chain.
        features: ``[n, d]``.
        targets: ``[n]``.
        certificate: of the start.
        optimizer: factory of the chain, as ``partial(dpb.optim.DPSGNHT, lr=0.1)``.
        epsilon, delta: the target of start and chain together, with what ``accountant`` holds.
        epochs: passes of the chain, at sampling rate batch_size / N.
        batch_size: expected size of a Poisson batch.
        max_grad_norm: clip norm of one record's gradient in the chain.
        start_share: the start may use up to ``start_share · epsilon``; the chain's noise is
            calibrated to the rest.
        samples: collects the chain's states, one per step. None: keeps the second half, thinned to
            at most 200.
        accountant: None: one with the target as its budget, for neighbours that replace one record.
        num_data: N. None: n, which counts as public in the chain. Under add-or-remove-one an upper
            bound, as for :class:`~torch_dpbayes.ops.OnePosteriorSample`; rows of zeros, which have
            no gradient, fill the data up to it.

    Raises:
        ValueError: start or chain would get no budget. Nothing is charged.
        PrivacyBudgetExceeded: start and chain do not fit the target or the accountant's budget.
            This is found before any charge, unless others charge the accountant during the run.

    **Privacy.** Releases: the start (event: the certificate's) and every state of the chain (event:
    a Poisson-sampled Gaussian per step). Each is charged before it is drawn. The split depends on
    public numbers alone.
    """
    if not isinstance(model, GLM):
        raise ArgumentError(f"model must be a dpb.ops.GLM, got {model!r}")
    if accountant is None:
        accountant = PrivacyAccountant(epsilon, delta, neighboring="replace_one")
    records = model.records(*model.prepare((features, targets)))
    x, y = records.x, records.y
    if num_data is not None and accountant.neighboring != "replace_one":
        missing = max(num_data - len(x), 0)
        x, y = nn.functional.pad(x, (0, 0, 0, missing)), nn.functional.pad(y, (0, missing))
    size = len(x)
    if num_data not in (None, size):
        raise ArgumentError(f"num_data = {num_data} does not fit the number of records.")
    if type(batch_size) is not int or not 0 < batch_size <= size:
        raise ArgumentError(f"batch_size must be a whole number from 1 to num_data: {batch_size!r}")
    if not isinstance(start_share, int | float) or not 0 < start_share < 1:
        raise ArgumentError(f"start_share must lie between 0 and 1, got {start_share!r}")
    if accountant.neighboring == "replace_one":
        num_data = size
    rate = batch_size / size
    loader = PoissonLoader(DataLoader(TensorDataset(x, y), batch_size=batch_size), rate)
    steps = positive_count(epochs, "epochs") * len(loader)
    first = OnePosteriorSample(
        model, certificate, start_share * epsilon, delta, accountant, num_data=num_data
    )
    noise = noise_multiplier_for(
        lambda z: PoissonSampledDpEvent(rate, GaussianDpEvent(z)),
        target_epsilon=epsilon,
        target_delta=delta,
        steps=steps,
        neighboring=accountant.neighboring,
        history=[*accountant.history, (first.event, 1)],
        method=accountant.method,
    )
    # without a temperature the given clip norm would decide it
    given = {"temperature": 1.0} | getattr(optimizer, "keywords", {}) | _prior_of(model)
    module, chain, private = PrivacyEngine(accountant).make_private(
        module=model.module(x.shape[1]).to(x),
        optimizer=partial(optimizer, **given),
        data_loader=loader,
        max_grad_norm=max_grad_norm,
        noise_multiplier=noise,
    )
    planned = SelfComposedDpEvent(chain.event(chain.effective_noise_multiplier), steps)
    total = epsilon_with(accountant, delta)(first.event, planned)
    both = ComposedDpEvent([first.event, planned])
    if total > epsilon * ROUND_UP or not accountant.remaining(both):
        raise PrivacyBudgetExceeded(
            f"start and chain together would cost epsilon = {total:.5g} at delta = {delta:g}:"
            " use a larger epsilon, fewer epochs or smaller batches. Nothing was charged."
        )
    start = first.sample(features, targets)
    with torch.no_grad():
        module.weights.copy_(start["weights"])
    if samples is None:
        likelihood: Any = {"bernoulli": "bernoulli", "gaussian": "normal"}.get(model.family)
        std = records.weight**-0.5 if likelihood == "normal" else None
        samples = PosteriorSamples(likelihood, max_samples=200, noise_std=std)
    for _ in range(epochs):
        for inputs, outputs in private:
            chain.zero_grad()
            records.loss_of(module(inputs), outputs).mean().backward()
            chain.step()
            samples.collect(module)
    return Hybrid(module, samples, start, accountant, first.guarantee())


def _prior_of(glm: GLM) -> dict[str, Any]:
    """The prior of a GLM as an argument of private optimizers."""
    if glm.prior_std.dim() == 0:
        return {"prior_std": float(glm.prior_std)}

    def log_prior(named: Mapping[str, Tensor]) -> Tensor:
        (weights,) = named.values()
        return -0.5 * (glm.prior_precision.to(weights) * weights.square()).sum()

    return {"log_prior": log_prior}
