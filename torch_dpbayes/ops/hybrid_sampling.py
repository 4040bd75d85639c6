"""Hybrid sampling: one posterior sample as the start of a private chain, both on one accountant."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ..accounting.accountant import PrivacyAccountant, PrivacyBudgetExceeded
from ..accounting.calibration import calibrated
from ..accounting.events import DpEvent, SelfComposedDpEvent, positive_count
from ..batches.poisson_loader import PoissonLoader
from ..engine.privacy_engine import PrivacyEngine
from ..errors import ArgumentError
from ..optim.base import PrivateOptimizer
from ..posterior import PosteriorSamples
from .certificates import Certificate
from .glm import GLM
from .models import Loss
from .one_posterior_sample import OnePosteriorSample


class Hybrid(NamedTuple):
    """What a hybrid run released, and what it cost.

    Attributes:
        module: the network with the last state of the chain; for a GLM it clips features as in
            fitting and returns the linear predictor.
        samples: states of the chain; ``samples.predict(module, x, transform=torch.sigmoid)``.
        start: the posterior sample that the chain began with.
        accountant: both charges.
        guarantee: of the start, in words.
    """

    module: nn.Module
    samples: PosteriorSamples
    start: dict[str, Tensor]
    accountant: PrivacyAccountant
    guarantee: str


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
    r"""One posterior sample, then a private chain from there: a start that is near the posterior
    saves the chain its way.

    .. math::
        \theta_0 \sim p_\rho(\theta \mid x)
        \propto p(\theta) \prod_i p(x_i \mid \theta)^\rho, \qquad
        \theta_1, \theta_2, \ldots \text{ by DP-SGLD, DP-SGHMC or DP-SGNHT}

    Source: Wang, Fienberg and Smola (2015), "Privacy for free", Algorithm 3.

    Args:
        model: a :class:`~torch_dpbayes.ops.GLM`, or a torch module in training mode, with ``loss``
            and ``prior_std``. The chain trains the module.
        features: ``[n, ...]``.
        targets: ``[n]`` for a GLM.
        certificate: of the start.
        optimizer: factory of the chain, as ``partial(dpb.optim.DPSGNHT, lr=0.1)``; its prior is the
            model's.
        epsilon, delta: the target of start and chain together, with what ``accountant`` holds when
            they are charged.
        epochs: passes of the chain, at sampling rate batch_size / N.
        batch_size: expected size of a Poisson batch.
        max_grad_norm: clip norm of one record's gradient in the chain.
        start_share: the start may use up to ``start_share · epsilon``, and the chain's noise is
            calibrated to what is left, which by exact accounting is more than the other share.
            None: the best split for a chain at its own temperature: the chain gets exactly what the
            noise of its own dynamics costs, which more budget would not lower, and the start all
            the rest.
        loss: for a module, −log p(y | x) of each record: ``loss(module(x), y)`` returns ``[n]``.
        prior_std: for a module, standard deviation of the N(0, prior_std²) prior of every trainable
            parameter.
        samples: where the chain's states are collected, once a step. None: the second half of them,
            thinned to at most 200.
        accountant: holds both charges. None: one with the target as its budget, for neighbours that
            replace one record.
        num_data: N. None: n, which counts as public in the chain. Under add-or-remove-one a GLM
            takes an upper bound on the number of records of both neighbouring data sets, which a
            finite run needs, as in :class:`~torch_dpbayes.ops.OnePosteriorSample`; the chain's data
            are filled up to it with rows of zeros, which have no gradient.

    Returns:
        A :class:`Hybrid`.

    Raises:
        ValueError: the split leaves one of the two nothing; the message says which numbers would
            do. Nothing is charged.
        PrivacyBudgetExceeded: start and chain pass the target or the accountant's budget, because
            others charged it meanwhile. Nothing is released; nothing is charged either, unless the
            others did it in the very moment of the charge.

    **Privacy.** Released are the start (event: the certificate's) and every state of the chain
    (event: that of its Poisson-sampled Gaussian, once a step). Both are charged in one piece before
    the start is drawn, so that nothing that others charge later comes between; a run that is
    interrupted stays charged. The split is a function of public numbers alone.
    """
    if accountant is None:
        accountant = PrivacyAccountant(epsilon, delta, neighboring="replace_one")
    if isinstance(model, GLM):
        if loss is not None or prior_std is not None:
            raise ArgumentError("a GLM has its own loss and prior: leave out loss= and prior_std=")
        size = model.num_records(model.prepare((features, targets)))
        records = model.records(features, targets)
        module: nn.Module = _LinearPredictor(model, records.x)
        chain_loss: Loss = partial(_glm_loss, model.family, records.weight)
        factory = partial(optimizer, **model.prior_of_optimizer(module))
        if num_data is not None and accountant.neighboring == "add_or_remove_one":
            if size > num_data:
                raise ArgumentError(
                    f"there are more records than num_data = {num_data}, the upper bound that"
                    " was stated: choose one for every data set that could occur."
                )
            spare, size = num_data - size, num_data
            dataset = TensorDataset(
                nn.functional.pad(records.x, (0, 0, 0, spare)),
                nn.functional.pad(records.y, (0, spare)),
            )
        else:
            dataset = TensorDataset(records.x, records.y)
        release = partial(OnePosteriorSample, model, certificate)
    else:
        if loss is None or prior_std is None:
            raise ArgumentError("a torch module needs loss=, one number a record, and prior_std=")
        size, module, chain_loss = len(features), model, loss
        factory = partial(optimizer, prior_std=prior_std)
        dataset = TensorDataset(features, targets)
        release = partial(
            OnePosteriorSample.for_module, model, certificate, loss=loss, prior_std=prior_std
        )
    if (
        isinstance(batch_size, bool)
        or not isinstance(batch_size, int)
        or not 0 < batch_size <= size
    ):
        raise ArgumentError(
            "batch_size must be a whole number between 1 and that of the records, got"
            f" {batch_size!r}"
        )
    if num_data is None and accountant.neighboring == "replace_one":
        num_data = size
    if num_data not in (None, size):
        raise ArgumentError(f"num_data = {num_data} was stated, but there are {size} records")
    loader = PoissonLoader(DataLoader(dataset, batch_size=batch_size), batch_size / size)
    steps = positive_count(epochs, "epochs") * len(loader)
    probe = factory(
        [(name, p) for name, p in module.named_parameters() if p.requires_grad],
        num_data=size,
        expected_batch_size=loader.expected_batch_size,
        max_grad_norm=max_grad_norm,
        sampling="poisson",
        accountant=PrivacyAccountant(neighboring=accountant.neighboring),
    )
    floor: float | None = None
    if start_share is None:
        own = probe.event(probe.effective_noise_multiplier)
        first = release(
            epsilon, delta, accountant, num_data=num_data, reserve=SelfComposedDpEvent(own, steps)
        )
        first.event  # noqa: B018  raises where nothing is left for the start
    elif 0 < start_share < 1:
        first = release(start_share * epsilon, delta, accountant, num_data=num_data)
        history = [*accountant.history, (first.event, 1)]
        floor = calibrated(
            probe.event,
            epsilon,
            delta,
            steps,
            accountant.neighboring,
            history,
            accountant.method,
        )
    else:
        raise ArgumentError(
            "start_share must lie between 0 and 1, or be None for the best split, got"
            f" {start_share!r}"
        )
    # whatever is wrong with the chain is found before the start is charged
    prepaid = _Prepaid(accountant)
    module, chain, private = PrivacyEngine(prepaid).make_private(
        module=module,
        optimizer=factory,
        data_loader=loader,
        max_grad_norm=max_grad_norm,
        noise_multiplier=floor,
    )
    # raises where the chain would refuse its first step
    step = chain.event(chain.effective_noise_multiplier)
    label = f"hybrid ({type(certificate).__name__}, {type(chain).__name__})"
    start = first.release_together(
        (features, targets), epsilon, None, label, together=SelfComposedDpEvent(step, steps)
    )
    prepaid.pay(step, steps)
    with torch.no_grad():
        parameters = dict(module.named_parameters())
        for name, value in start.items():
            p = parameters["linear.weight" if isinstance(model, GLM) else name]
            p.copy_(value.reshape(p.shape))
    if samples is None:
        samples = PosteriorSamples(
            burn_in=steps // 2, thin=max(1, math.ceil(steps / 400)), max_samples=200
        )
    for _ in range(epochs):
        for x, y in private:
            chain.zero_grad()
            chain_loss(module(x), y).mean().backward()
            chain.step()
            samples.collect(module)
    return Hybrid(module, samples, start, accountant, first.guarantee())


class _Prepaid(PrivacyAccountant):
    """Lets a chain take the steps that another accountant was charged for beforehand, and
    nothing else.
    """

    def __init__(self, payer: PrivacyAccountant) -> None:
        super().__init__(neighboring=payer.neighboring)
        self._payer = payer
        self._paid: DpEvent | None = None
        self._left = 0

    def note(self, statement: str) -> None:
        self._payer.note(statement)

    def pay(self, event: DpEvent, count: int) -> None:
        self._paid, self._left = event, count

    def compose(
        self, event: DpEvent, count: int = 1, label: str | None = None, adaptive: bool = False
    ) -> PrivacyAccountant:
        if event != self._paid or count > self._left:
            raise PrivacyBudgetExceeded(
                f"the chain of a hybrid run was charged beforehand, {self._left} more times"
                f" {self._paid}, not {count} x {event}. Nothing was released: use an optimizer"
                " whose lr does not change."
            )
        self._left -= count
        return self


class _LinearPredictor(nn.Module):
    """u = xᵀw with the features clipped as the GLM clips them."""

    def __init__(self, glm: GLM, like: Tensor) -> None:
        super().__init__()
        self._glm = glm
        self.linear = nn.Linear(like.shape[1], 1, bias=False, dtype=like.dtype, device=like.device)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(self._glm.features(x))
        return result.squeeze(-1)


def _glm_loss(family: str, weight: float, u: Tensor, y: Tensor) -> Tensor:
    if family == "bernoulli":
        return nn.functional.binary_cross_entropy_with_logits(u, y, reduction="none")
    if family == "poisson":
        return nn.functional.poisson_nll_loss(u, y, reduction="none")
    return weight / 2 * (u - y).square()
