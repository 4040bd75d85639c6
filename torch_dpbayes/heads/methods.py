"""The three ways to a private head's posterior: each hands out samples of its weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ..accounting.accountant import PrivacyAccountant
from ..engine.privacy_engine import PrivacyEngine
from ..noise_aware.laplace import laplace
from ..ops.certificates import FiniteRunLangevin
from ..ops.glm import GLM
from ..ops.one_posterior_sample import OnePosteriorSample
from ..ops.softmax import Softmax
from ..optim.base import PrivateOptimizer
from ..optim.sghmc import DPSGHMC
from ..posterior import PosteriorSamples
from .records import HeadRecords, require_features, together, usable


@dataclass(frozen=True)
class Task:
    """What a head is to learn, and what it may spend.

    Args:
        num_classes: K, or None for a regression.
        noise_std: of a regression's targets.
        prior_std: of each weight.
        epsilon, delta: of everything on the accountant afterwards; None takes its budget.
        accountant: where the fit is charged.
        num_data: the number of records, a public constant, where it has to be stated.
    """

    num_classes: int | None
    noise_std: float | None
    prior_std: float
    epsilon: float | None
    delta: float | None
    accountant: PrivacyAccountant
    num_data: int | None

    @property
    def outputs(self) -> int:
        """Of the linear layer."""
        return 1 if self.num_classes is None else self.num_classes

    @property
    def unit(self) -> float:
        """Of a regression's targets."""
        return 1.0 if self.noise_std is None else self.noise_std


@dataclass(frozen=True)
class Fitted:
    """A module whose weights are the last iterate or draw, samples of them, and the guarantee in
    words.
    """

    module: nn.Linear
    samples: PosteriorSamples
    guarantee: str


class Method(Protocol):
    """A way to a posterior."""

    @property
    def max_feature_norm(self) -> float | None:
        """The norm that rows of features are shortened to, without the constant 1 behind them;
        None: they are not.
        """

    @property
    def neighboring(self) -> str:
        """Of an accountant that nobody passed."""

    def fit(self, task: Task, features: Tensor, targets: Tensor) -> Fitted:
        """Charges, then learns."""


@dataclass(frozen=True)
class SGHMC:
    """:class:`~torch_dpbayes.optim.DPSGHMC` on the head, through
    :class:`~torch_dpbayes.PrivacyEngine`.

    The samples are the iterates of the last steps, evenly spaced; their average costs nothing.

    Args:
        lr: step size on the mean loss; gradients are clipped to ``max_grad_norm``, so it is large.
        epochs: passes over the records.
        batch_size: expected number of records in a batch, at most all of them.
        max_grad_norm: C, the clip norm of a record's gradient. Those of unnormalised features are
            longer: most are shortened to C, and no record counts more than another.
        momentum: of DPSGHMC.
        temperature: of DPSGHMC. 0, the default, adds no noise beyond the privacy noise; 1 samples
            the posterior if lr allows it.
        burn_in: share of the steps whose iterates are no samples.
        num_samples: how many iterates are kept, at least 2.
        schedule: ``optimizer -> scheduler``, stepped after every step, as ``lambda opt:
            torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=20)`` for a warm-up. It must be
            fixed in advance.

    **Privacy.** Each step is charged as that of the optimizer. The loss of a record with several
    views is their mean: its gradient is averaged over them before it is clipped, so that any number
    of views costs what one does (De et al., 2022).
    """

    lr: float = 4.0
    epochs: int = 40
    batch_size: int = 8192
    max_grad_norm: float = 0.1
    momentum: float = 0.9
    temperature: float = 0.0
    burn_in: float = 0.5
    num_samples: int = 50
    schedule: Callable[[PrivateOptimizer], LRScheduler] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.burn_in < 1:
            raise ValueError(f"burn_in must be a share in [0, 1) of the steps, got {self.burn_in}.")

    @property
    def max_feature_norm(self) -> None:
        """Gradients are clipped instead."""
        return None

    @property
    def neighboring(self) -> str:
        """The engine's."""
        return "add_or_remove_one"

    def fit(self, task: Task, features: Tensor, targets: Tensor) -> Fitted:
        """See :class:`Method`."""
        features = require_features(features, views=True)
        records = HeadRecords(features, targets, task.num_classes, task.unit)
        if task.num_data not in (None, len(records)):
            raise ValueError(
                f"num_data = {task.num_data} was stated, but the batches are drawn from"
                f" {len(records)} records: leave it out."
            )
        module = linear(features.shape[-1] + 1, task.outputs).to(features.device)
        epsilon = task.accountant.epsilon if task.epsilon is None else task.epsilon
        delta = task.accountant.delta if task.delta is None else task.delta
        if epsilon is None or delta is None:
            raise ValueError("a budget is needed: fit(..., epsilon=1.0, delta=1e-5).")
        _, optimizer, loader = PrivacyEngine(task.accountant).make_private_with_epsilon(
            module=module,
            optimizer=partial(
                DPSGHMC,
                lr=self.lr,
                momentum=self.momentum,
                temperature=self.temperature,
                prior_std=task.prior_std,
            ),
            data_loader=DataLoader(
                records, min(self.batch_size, len(records)), collate_fn=together
            ),
            max_grad_norm=self.max_grad_norm,
            target_epsilon=epsilon,
            target_delta=delta,
            epochs=self.epochs,
            assume_independent_records=True,  # a layer of features, of each record alone
        )
        steps = self.epochs * len(loader)
        first = min(int(self.burn_in * steps), steps - 1)
        thin = max(1, -(-(steps - first) // self.num_samples))
        samples = PosteriorSamples(first, thin, max(2, self.num_samples))
        schedule = None if self.schedule is None else self.schedule(optimizer)
        for _ in range(self.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                _loss(module(x), y, task).backward()
                optimizer.step()
                samples.collect(module)
                if schedule is not None:
                    schedule.step()
        return Fitted(module, samples, task.accountant.summary())


@dataclass(frozen=True)
class NoiseAware:
    """:func:`~torch_dpbayes.noise_aware.laplace` of the head, whose posterior is as wide as records
    and noise make it; for up to 4,000 weights.

    Args:
        max_feature_norm: to which rows are shortened; a public number.
        max_grad_norm: clip norm of a record's gradient, for a regression only: those of classes
            have a bound.
        num_samples: draws for predictions, which are free.

    **Privacy.** With rows no longer than R, and the constant 1 behind them, a record's gradient is
    no longer than √2·√(R² + 1) for several classes and √(R² + 1) for two, and the Frobenius norm of
    its Hessian at most (R² + 1)/2, or a quarter of R² + 1.
    """

    max_feature_norm: float = 1.0
    max_grad_norm: float | None = None
    num_samples: int = 200

    @property
    def neighboring(self) -> str:
        """Under which the number of records is public."""
        return "replace_one"

    def fit(self, task: Task, features: Tensor, targets: Tensor) -> Fitted:
        """See :class:`Method`."""
        model, x, y = _bounded(self, task, features, targets)
        posterior = laplace(
            model,
            x,
            y,
            epsilon=task.epsilon,
            delta=task.delta,
            accountant=task.accountant,
            max_grad_norm=self.max_grad_norm,
            num_data=task.num_data,
        )
        return _of_draws(
            posterior.sample(self.num_samples)["weights"], task, x.shape[1], posterior.guarantee()
        )


@dataclass(frozen=True)
class OneDraw:
    """One draw from the head's posterior, private by the certificate
    :class:`~torch_dpbayes.ops.FiniteRunLangevin`.

    One draw has no spread: what it says of uncertainty is the entropy of its predictions. Another
    fit is another draw, and another charge.

    Args:
        steps: of the Langevin chain, each over all records.
        max_feature_norm: as for :class:`NoiseAware`.
        max_grad_norm: clip norm of a record's gradient, for a regression only.

    **Privacy.** The constants of :class:`~torch_dpbayes.ops.GLM` and
    :class:`~torch_dpbayes.ops.Softmax` hold for every data set, and nothing is assumed.
    """

    steps: int = 1000
    max_feature_norm: float = 1.0
    max_grad_norm: float | None = None

    @property
    def neighboring(self) -> str:
        """Under which the number of records is public."""
        return "replace_one"

    def fit(self, task: Task, features: Tensor, targets: Tensor) -> Fitted:
        """See :class:`Method`."""
        model, x, y = _bounded(self, task, features, targets)
        if isinstance(model, Softmax):
            clip = model.lipschitz
        elif task.num_classes is not None:
            clip = model.max_feature_norm
        elif self.max_grad_norm is None:
            raise ValueError(
                "gradients of a regression are unbounded: state OneDraw(max_grad_norm=...), a"
                " public number that few of them exceed."
            )
        else:
            clip = self.max_grad_norm
        epsilon = task.accountant.epsilon if task.epsilon is None else task.epsilon
        sampler = OnePosteriorSample(
            model,
            FiniteRunLangevin(self.steps, max_grad_norm=clip),
            epsilon,
            task.delta,
            task.accountant,
            num_data=task.num_data,
        )
        draw = sampler.sample(x, y)["weights"]
        return _of_draws(draw[None], task, x.shape[1], sampler.guarantee())


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer at zero, where no record put it; the last input is the constant 1."""
    module = nn.Linear(inputs, outputs, bias=False)
    nn.init.zeros_(module.weight)
    return module


def with_constant(features: Tensor, max_norm: float | None) -> Tensor:
    """Rows shortened to ``max_norm``, and a 1 behind them that stays 1."""
    features = features.float()
    if max_norm is not None:
        # as in fitting: rows that are too long alone
        features = GLM("gaussian", 1.0, max_norm, noise_std=1.0).features(features)
    return nn.functional.pad(features, (0, 1), value=1.0)


def _loss(output: Tensor, targets: Tensor, task: Task) -> Tensor:
    """The mean of −log p over the records, of several views the mean over them too."""
    views = output.shape[1] if output.dim() == 3 else 1
    output = output.reshape(-1, task.outputs)
    if views > 1:
        targets = targets.repeat_interleave(views)
    if task.num_classes is not None:
        return nn.functional.cross_entropy(output, targets)
    assert task.noise_std is not None
    return nn.functional.mse_loss(output[:, 0], targets) / (2 * task.noise_std**2)


def _bounded(
    method: NoiseAware | OneDraw, task: Task, features: Tensor, targets: Tensor
) -> tuple[GLM | Softmax, Tensor, Tensor]:
    """The model, whose bound counts the constant too, and its records."""
    features = require_features(features, views=False)
    if method.max_grad_norm is not None and task.num_classes is not None:
        raise ValueError(
            "gradients of classes have a bound of their own: leave out max_grad_norm, and choose"
            " max_feature_norm."
        )
    is_usable = usable(features, targets, task.num_classes, task.unit)
    x = with_constant(features, method.max_feature_norm)
    x[~is_usable] = 0.0  # the 1 too, so that the gradient is exactly zero
    y = torch.where(is_usable, targets.to(x.device), torch.zeros_like(targets, device=x.device))
    longest = math.sqrt(method.max_feature_norm**2 + 1) * (1 + 1e-6)
    model: GLM | Softmax
    if task.num_classes is None:
        model = GLM("gaussian", task.prior_std, longest, noise_std=task.noise_std)
    elif task.num_classes == 2:
        # whose weights are the difference of those of the classes
        model = GLM("bernoulli", math.sqrt(2) * task.prior_std, longest)
    else:
        model = Softmax(task.num_classes, task.prior_std, longest)
    return model, x, y


def _of_draws(draws: Tensor, task: Task, inputs: int, guarantee: str) -> Fitted:
    if task.num_classes == 2:
        draws = torch.stack([-draws / 2, draws / 2], 1)
    draws = draws.reshape(len(draws), task.outputs, inputs)
    module = linear(inputs, task.outputs)
    samples = PosteriorSamples(max_samples=max(2, len(draws)))
    for draw in draws:
        with torch.no_grad():
            module.weight.copy_(draw)
        samples.collect(module)
    return Fitted(module, samples, guarantee)
