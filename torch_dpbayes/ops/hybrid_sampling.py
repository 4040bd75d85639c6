"""Hybrid sampling: one posterior sample as the start of a private chain, both on one accountant."""

from __future__ import annotations

import math
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
from .models import Loss
from .one_posterior_sample import OnePosteriorSample
from .tempering import epsilon_with


class Hybrid(NamedTuple):
    """What a hybrid run released, and what it cost."""

    module: nn.Module
    """With the chain's last state; a GLM's returns linear predictors of clipped features."""
    samples: PosteriorSamples
    """States of the chain: ``samples.predict(module, x)``; of a module, the likelihood is that of
    ``samples=``, or give ``transform=``."""
    start: dict[str, Tensor]
    """The posterior sample that the chain began with."""
    accountant: PrivacyAccountant
    guarantee: str
    """Of the start, in words."""


def hybrid(
    model: GLM | nn.Module,
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
    start_share: float | None = 0.5,
    loss: Loss | None = None,
    prior_std: float | None = None,
    samples: PosteriorSamples | None = None,
    accountant: PrivacyAccountant | None = None,
    num_data: int | None = None,
) -> Hybrid:
    r"""One posterior sample, then a private chain from there: a start near the posterior saves the
    chain its way (Wang, Fienberg and Smola 2015, Algorithm 3).

    .. math::
        \theta_0 \sim p_\rho(\theta \mid x) \propto p(\theta) \prod_i p(x_i \mid \theta)^\rho,
        \qquad \theta_1, \theta_2, \ldots \text{ by DP-SGLD, DP-SGHMC or DP-SGNHT}

    Args:
        model: a :class:`~torch_dpbayes.ops.GLM`, or a torch module in training mode, with ``loss``
            and ``prior_std``. The chain trains the module.
        features: ``[n, ...]``.
        targets: ``[n]`` for a GLM.
        certificate: of the start.
        optimizer: factory of the chain, as ``partial(dpb.optim.DPSGNHT, lr=0.1)``; its prior is the
            model's.
        epsilon, delta: the target of start and chain together, with what ``accountant`` holds.
        epochs: passes of the chain, at sampling rate batch_size / N.
        batch_size: expected size of a Poisson batch.
        max_grad_norm: clip norm of one record's gradient in the chain.
        start_share: the start may use up to ``start_share · epsilon``, and the chain's noise is
            calibrated to what is left. None: the chain gets what its own noise costs, which more
            budget would not lower, and the start the rest.
        loss: for a module, −log p(y | x) of each record: ``loss(module(x), y)`` returns ``[n]``.
        prior_std: for a module, of the N(0, prior_std²) prior of every trainable parameter.
        samples: where the chain's states are collected, once a step. None: the second half of them,
            thinned to at most 200.
        accountant: None: one with the target as its budget, for neighbours that replace one record.
        num_data: N. None: n, which counts as public in the chain. Under add-or-remove-one a GLM
            takes an upper bound, as :class:`~torch_dpbayes.ops.OnePosteriorSample` does; the data
            are filled up to it with rows of zeros, which have no gradient.

    Raises:
        ValueError: the split leaves one of the two nothing. Nothing is charged.
        PrivacyBudgetExceeded: start and chain do not fit the target or the accountant's budget:
            before anything is charged, unless others charge the accountant during the run.

    **Privacy.** Released are the start (event: the certificate's) and every state of the chain
    (event: its Poisson-sampled Gaussian, once a step). Each is charged before it is drawn. The
    split depends on public numbers alone.
    """
    if accountant is None:
        accountant = PrivacyAccountant(epsilon, delta, neighboring="replace_one")
    make: Callable[..., OnePosteriorSample]
    if isinstance(model, GLM):
        if loss is not None or prior_std is not None:
            raise ArgumentError("a GLM has its own loss and prior: leave out loss= and prior_std=")
        records = model.records(*model.prepare((features, targets)))
        x, y = records.x, records.y
        module: nn.Module = _LinearPredictor(model, x)
        prior, loss = _prior_of(model), partial(_glm_loss, model.family, records.weight)
        make = partial(OnePosteriorSample, model, certificate)
        if num_data is not None and accountant.neighboring != "replace_one":
            missing = max(num_data - len(x), 0)
            x = nn.functional.pad(x, (0, 0, 0, missing))
            y = nn.functional.pad(y, (0, missing))
    else:
        if loss is None or prior_std is None:
            raise ArgumentError("a torch module needs loss=, one number a record, and prior_std=")
        x, y, module, prior = features, targets, model, {"prior_std": prior_std}
        make = partial(
            OnePosteriorSample.for_module, model, certificate, loss=loss, prior_std=prior_std
        )
    size = len(x)
    if num_data not in (None, size):
        raise ArgumentError(
            f"num_data = {num_data} was stated, and there are other or more records than that."
        )
    if type(batch_size) is not int or not 0 < batch_size <= size:
        raise ArgumentError(f"batch_size must be a whole number from 1 to num_data: {batch_size!r}")
    if start_share is not None and not 0 < start_share < 1:
        raise ArgumentError(
            f"start_share must lie between 0 and 1, or be None for the best split: {start_share!r}"
        )
    if accountant.neighboring == "replace_one":
        num_data = size
    loader = PoissonLoader(
        DataLoader(TensorDataset(x, y), batch_size=batch_size), batch_size / size
    )
    steps = positive_count(epochs, "epochs") * len(loader)

    def of_noise(multiplier: float) -> PoissonSampledDpEvent:
        return PoissonSampledDpEvent(batch_size / size, GaussianDpEvent(multiplier))

    is_stated = "temperature" in getattr(optimizer, "keywords", {})
    cold = {} if is_stated else {"temperature": 1.0}  # else a given clip norm would decide it
    noise = None
    if start_share is not None:
        first = make(start_share * epsilon, delta, accountant, num_data=num_data)
        noise = noise_multiplier_for(
            of_noise,
            target_epsilon=epsilon,
            target_delta=delta,
            steps=steps,
            neighboring=accountant.neighboring,
            history=[*accountant.history, (first.event, 1)],
            method=accountant.method,
        )
    module, chain, private = PrivacyEngine(accountant).make_private(
        module=module,
        optimizer=partial(optimizer, **prior, **cold),
        data_loader=loader,
        max_grad_norm=max_grad_norm,
        noise_multiplier=noise,
    )
    planned = SelfComposedDpEvent(chain.event(chain.effective_noise_multiplier), steps)
    if start_share is None:
        first = make(epsilon, delta, accountant, num_data=num_data, reserve=planned)
    total = epsilon_with(accountant, delta)((first.event, planned))
    if total > epsilon * ROUND_UP or not accountant.remaining(
        ComposedDpEvent([first.event, planned])
    ):
        raise PrivacyBudgetExceeded(
            f"start and chain together would cost epsilon = {total:.5g} at delta = {delta:g}:"
            " use a larger epsilon, fewer epochs or smaller batches. Nothing was charged."
        )
    start = first.sample(features, targets)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if p.requires_grad:
                p.copy_(start["weights" if isinstance(model, GLM) else name].reshape(p.shape))
    if samples is None:
        thin = max(1, math.ceil(steps / 400))
        is_binary = isinstance(model, GLM) and model.family == "bernoulli"
        samples = PosteriorSamples(
            "bernoulli" if is_binary else None, steps // 2, thin, max_samples=200
        )
    for _ in range(epochs):
        for inputs, outputs in private:
            chain.zero_grad()
            loss(module(inputs), outputs).mean().backward()
            chain.step()
            samples.collect(module)
    return Hybrid(module, samples, start, accountant, first.guarantee())


class _LinearPredictor(nn.Module):
    """u = xᵀw with the features clipped as the GLM clips them."""

    def __init__(self, glm: GLM, like: Tensor) -> None:
        super().__init__()
        self._glm = glm
        self.linear = nn.Linear(like.shape[1], 1, bias=False, dtype=like.dtype, device=like.device)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(self._glm.features(x))
        return result.squeeze(-1)


def _prior_of(glm: GLM) -> dict[str, Any]:
    """The prior of a GLM as an argument of private optimizers."""
    if glm.prior_std.dim() == 0:
        return {"prior_std": float(glm.prior_std)}

    def log_prior(named: Mapping[str, Tensor]) -> Tensor:
        (weights,) = named.values()
        return -0.5 * (glm.prior_precision.to(weights) * weights.reshape(-1).square()).sum()

    return {"log_prior": log_prior}


def _glm_loss(family: str, weight: float, u: Tensor, y: Tensor) -> Tensor:
    if family == "bernoulli":
        return nn.functional.binary_cross_entropy_with_logits(u, y, reduction="none")
    if family == "poisson":
        return nn.functional.poisson_nll_loss(u, y, reduction="none")
    return weight / 2 * (u - y).square()
