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
from ..optim.settings import require_fraction
from ..posterior import PosteriorSamples
from .certificates import Certificate
from .certificates.certificate import ROUND_UP
from .glm import GLM
from .one_posterior_sample import OnePosteriorSample, epsilon_with


class Hybrid(NamedTuple):
    """The releases of a hybrid run, and their cost."""

    module: nn.Module  # linear predictors of clipped features, in the chain's last state
    # states of the chain: call samples.predict(module, x), for counts predict(module, x, torch.exp)
    samples: PosteriorSamples
    start: dict[str, Tensor]  # the posterior sample at which the chain started
    accountant: PrivacyAccountant
    guarantee: str  # text on the guarantee of the start


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
) -> Hybrid:
    r"""Draws one posterior sample, and continues from it with DP-SGLD, DP-SGHMC or DP-SGNHT. So the
    chain starts near the posterior (Wang, Fienberg and Smola 2015, Algorithm 3).

    Args:
        model, features, targets: define the loss and prior of start and chain.
        certificate: certificate of the start, which costs at most ``start_share · epsilon``.
        optimizer: factory of the chain, for example ``partial(dpb.optim.DPSGNHT, lr=0.1)``. Its
            noise is calibrated to the budget that remains after the start.
        epsilon, delta: the target of start, chain and earlier charges of ``accountant`` together.
        epochs, batch_size: epochs and expected size of the Poisson batches of the chain.
        max_grad_norm: clip norm of one record's gradient in the chain.
        samples: collects the chain's states, one per step. None: keep the second half, thinned to
            at most 200 states.
        accountant: must be for replace-one. None: a new one with the target as its budget.

    Raises:
        ValueError: an argument is out of range, or start or chain would get no budget.
        PrivacyBudgetExceeded: start and chain do not fit the target or the accountant's budget.
            Neither is charged, unless others charge the accountant during the run.

    **Privacy.** Releases the start (with the certificate's event) and every state of the chain
    (with one Poisson-sampled Gaussian event per step). Each is charged before it is drawn. The
    split of the budget depends only on public numbers.
    """
    if not isinstance(model, GLM):
        raise ArgumentError(f"model must be a dpb.ops.GLM, got {model!r}")
    if accountant is None:
        accountant = PrivacyAccountant(epsilon, delta, neighboring="replace_one")
    if accountant.neighboring != "replace_one":
        raise ArgumentError(
            "the noise of a hybrid run depends on the number of records: pass"
            " PrivacyAccountant(neighboring='replace_one'), where this number is public."
        )
    records = model.records(*model.prepare((features, targets)))
    rate = positive_count(batch_size, "batch_size") / len(records.x)
    data = TensorDataset(records.x, records.y)
    loader = PoissonLoader(DataLoader(data, batch_size=batch_size), rate)
    steps = positive_count(epochs, "epochs") * len(loader)
    start_epsilon = require_fraction("start_share", start_share) * epsilon
    size = len(data)
    first = OnePosteriorSample(model, certificate, start_epsilon, delta, accountant, num_data=size)
    noise = noise_multiplier_for(
        lambda z: PoissonSampledDpEvent(rate, GaussianDpEvent(z)),
        target_epsilon=epsilon,
        target_delta=delta,
        steps=steps,
        neighboring=accountant.neighboring,
        history=[*accountant.history, (first.event, 1)],
        method=accountant.method,
    )
    # without this, the clip norm would determine the temperature
    given = {"temperature": 1.0} | getattr(optimizer, "keywords", {}) | _prior_of(model)
    module, chain, private = PrivacyEngine(accountant).make_private(
        module=model.module(records.x.shape[1]).to(records.x),
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
