"""A private Bayesian last layer: features in, a posterior over linear layers out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .. import words
from ..accounting.accountant import PrivacyAccountant
from .methods import SGHMC, Fitted, Method, Task, linear, with_constant
from .records import require_features, require_targets


class PrivateLinear:
    r"""A linear head on fixed features, by any of three private methods.

    .. math:: p(y = k \mid x, W) = \mathrm{softmax}_k(W [x, 1]) \quad \text{or} \quad y \sim N(W [x,
        1], \sigma^2), \qquad W_{kj} \sim N(0, \text{prior\_std}^2)

    ::

        head = dpb.heads.PrivateLinear(num_classes=10)
        posterior = head.fit(features, labels, epsilon=3, delta=1e-5)
        probabilities = posterior.predict(test_features)
        doubt = posterior.mutual_information(test_features)
        print(posterior.guarantee())

    Args:
        num_classes: K, or None for a regression.
        method: :class:`~torch_dpbayes.heads.SGHMC` for many features and records,
            :class:`~torch_dpbayes.heads.NoiseAware` for few features or a small ε,
            :class:`~torch_dpbayes.heads.OneDraw` for one set of weights.
        prior_std: standard deviation of each weight's Gaussian prior, in units of
            target / feature. Two classes have a difference of weights of √2·``prior_std``.
        noise_std: σ of a regression's targets, a public number. Needed there, refused elsewhere.
        accountant: where every fit is charged. None: each fit has one of its own, for neighbours
            that add or remove a record (SGHMC) or replace one (the others).

    Raises:
        ValueError, TypeError: an argument is out of range.

    **Privacy.** A fit is charged to the accountant before anything is released; the methods say how
    far one record moves what they release. All of it rests on features that are a record's own:
    features that were standardised, whitened or projected on principal components with statistics
    of the private records, or that come from a network trained on them, carry other records into
    this one, and no bound holds. That cannot be seen in a tensor. See
    :func:`~torch_dpbayes.heads.group_normalised` and :class:`~torch_dpbayes.heads.Scattering`.
    """

    def __init__(
        self,
        num_classes: int | None,
        *,
        method: Method | None = None,
        prior_std: float = 1.0,
        noise_std: float | None = None,
        accountant: PrivacyAccountant | None = None,
    ) -> None:
        if num_classes is not None and (
            isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 2
        ):
            raise ValueError(
                f"num_classes must be a whole number from 2, or None for a regression, got"
                f" {num_classes!r}."
            )
        if (noise_std is None) != (num_classes is not None):
            raise ValueError(
                "noise_std is the standard deviation of a regression's targets: state it with"
                " num_classes=None, and leave it out with classes."
            )
        for name, value in (("prior_std", prior_std), ("noise_std", noise_std)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive finite number, got {value!r}.")
        method = SGHMC() if method is None else method
        if isinstance(method, type) or not hasattr(method, "fit"):
            raise TypeError(
                "method must be dpb.heads.SGHMC(...), NoiseAware(...) or OneDraw(...), got"
                f" {method!r}."
            )
        self.num_classes, self.method = num_classes, method
        self.prior_std, self.noise_std = prior_std, noise_std
        self.accountant = accountant

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_classes={self.num_classes}, method={self.method!r})"

    def fit(
        self,
        features: Tensor,
        targets: Tensor,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        num_data: int | None = None,
    ) -> HeadPosterior:
        """Charge, learn, and hand out the posterior.

        A record with a feature that is not finite or beyond 1e15, or with a label that is no class
        (a target beyond 1e15·σ), contributes exactly nothing, and nothing says so: an error or a
        warning would tell of that record. Check your labels before.

        Args:
            features: ``[n, d]``, of any floating-point type; for :class:`SGHMC` also ``[n, views,
                d]``, several views of each record, of which the gradients are averaged.
            targets: integers from 0 to K − 1, or numbers, ``[n]``.
            epsilon: of everything on the accountant after the fit. None: the accountant's budget.
            delta: likewise.
            num_data: the number of records, a public constant, where an accountant for neighbours
                that add or remove a record keeps it private (:class:`NoiseAware`,
                :class:`OneDraw`).

        Raises:
            ValueError: shapes or types do not fit, or there is no budget. Nothing is charged.
            PrivacyBudgetExceeded: the fit would pass the accountant's budget.
        """
        found = require_features(features, views=True)
        wanted = require_targets(targets, len(found), self.num_classes)
        accountant = self.accountant
        if accountant is None:
            accountant = PrivacyAccountant(epsilon, delta, neighboring=self.method.neighboring)
        task = Task(
            self.num_classes,
            self.noise_std,
            self.prior_std,
            epsilon,
            delta,
            accountant,
            num_data,
        )
        fitted = self.method.fit(task, found, wanted)
        return HeadPosterior(fitted, task, self.method.max_feature_norm)


class HeadPosterior:
    """What a private head knows, and how surely. Made by :meth:`PrivateLinear.fit`.

    Test features that are not finite are refused. Predictions are for test records that are public
    or whose owner asks: they are covered by no guarantee of the training.

    **Privacy.** Post-processing of what was released: predict as often as you like.
    """

    def __init__(self, fitted: Fitted, task: Task, max_feature_norm: float | None) -> None:
        self._fitted, self._task = fitted, task
        self._max_feature_norm = max_feature_norm
        self.module = fitted.module
        """The last iterate or draw, a linear layer on features with a 1 behind them."""
        self.samples = fitted.samples
        """The weights' samples, as :class:`~torch_dpbayes.PosteriorSamples`."""
        self.accountant = task.accountant
        """Where the fit was charged."""

    def __repr__(self) -> str:
        numbers = {"samples": len(self.samples), "num_classes": self._task.num_classes}
        return words.one_line(self, numbers, self.accountant)

    @property
    def mean_weights(self) -> Tensor:
        """Average of the samples' weights ``[outputs, d + 1]``, the intercepts in the last column:
        of iterates of DP-SGHMC the tail average.
        """
        return torch.from_numpy(self.samples.draws_of("weight")).double().mean(0).float()

    def predict(self, features: Tensor) -> Tensor:
        """Class probabilities ``[n, K]``, or means ``[n]``, averaged over the posterior.

        Args:
            features: ``[n, d]``, made as those of the training records were.

        Raises:
            ValueError: they have another width, or a value that is not finite.
        """
        seen = self._seen(features)
        if self._task.num_classes is None:
            return self.samples.predict(self.module, seen, transform=None)[:, 0]
        return self.samples.predict(self.module, seen)

    def predict_last(self, features: Tensor) -> Tensor:
        """The same by the last iterate, or the last draw, alone."""
        return self._of_one(self.module, features)

    def predict_with_mean(self, features: Tensor) -> Tensor:
        """The same by :attr:`mean_weights`."""
        weights = self.mean_weights
        module = linear(weights.shape[1], weights.shape[0])
        with torch.no_grad():
            module.weight.copy_(weights)
        return self._of_one(module.to(self.module.weight.device), features)

    def predictive_entropy(self, features: Tensor) -> Tensor:
        """Entropy of the averaged class probabilities ``[n]``, in nats: all the uncertainty."""
        self._require_classes("predictive_entropy")
        return self.samples.predictive_entropy(self.module, self._seen(features))

    def mutual_information(self, features: Tensor) -> Tensor:
        """What the samples disagree about, ``[n]``, in nats.

        Raises:
            ValueError: the posterior is one draw, which has nothing to disagree with.
        """
        self._require_classes("mutual_information")
        if len(self.samples) < 2:
            raise ValueError(
                "one draw says nothing about the weights' uncertainty: use predictive_entropy, or"
                " method=dpb.heads.NoiseAware()."
            )
        return self.samples.mutual_information(self.module, self._seen(features))

    def predictive_quantiles(self, features: Tensor, quantiles: Sequence[float]) -> Tensor:
        """Of a regression's target, noise included, ``[len(quantiles), n]``."""
        if self._task.noise_std is None:
            raise ValueError("quantiles are of a regression's targets: use predict for classes.")
        found = self.samples.predictive_quantiles(
            self.module, self._seen(features), quantiles, noise_std=self._task.noise_std
        )
        return found[..., 0]

    def guarantee(self) -> str:
        """What was charged, and what it rests on, in words."""
        return "\n".join(
            [
                self._fitted.guarantee,
                (
                    "  ASSUMED     a record's features are a function of this record and of public"
                    " things alone"
                ),
            ]
        )

    def _of_one(self, module: nn.Linear, features: Tensor) -> Tensor:
        with torch.no_grad():
            outputs = module(self._seen(features))
        return outputs[:, 0] if self._task.num_classes is None else outputs.softmax(-1)

    def _require_classes(self, what: str) -> None:
        if self._task.num_classes is None:
            raise ValueError(f"{what} is of class probabilities: use predictive_quantiles here.")

    def _seen(self, features: Tensor) -> Tensor:
        """Test features as those of the training records were seen."""
        found = require_features(features, views=False)
        width = self.module.in_features - 1
        if found.shape[1] != width:
            raise ValueError(
                f"the head was trained on {width} features a record, got {found.shape[1]}."
            )
        if not bool(found.isfinite().all()):
            raise ValueError("test features must be finite: mend or leave out those records.")
        weight = self.module.weight
        return with_constant(found, self._max_feature_norm).to(weight.device, weight.dtype)
