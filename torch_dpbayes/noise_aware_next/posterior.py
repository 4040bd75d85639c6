"""The front door: a private run on a model's records, and the posterior that knows its noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from ..accounting.accountant import PrivacyAccountant
from ..mcmc.checks import check_clip_bound
from ..ops.glm import GLM
from ..ops.models import using_pyro
from ..ops.softmax import Softmax
from .budget import (
    NUM_RELEASES,
    Plan,
    budget_of,
    plan_run,
    public_num_data,
    statement_of_charge,
    total_multiplier,
)
from .checks import note, prior_p_value, release_p_values
from .covariates import (
    FeatureShape,
    Nothing,
    PublicRows,
    Released,
    constants_of,
    feature_shape,
)
from .drawing import draw_posterior
from .latents import Latents
from .likelihood import Covariates, Simulator, SyntheticLikelihood, find_mode
from .records import ModelRecords
from .result import NoiseAwarePosterior
from .run import Mechanism, Transcript, run

_LABEL = "noise_aware.posterior"
_SIMULATED, _SIMULATED_IN_RUN = 40_000, 8_000  # multiples of the next line
_FEW = 4000  # simulated records whose weights are computed for each draw
_FEW_PER_DIMENSION = 40
_MOST_BATCHES = 50  # of simulated records for the mean at the centre
_LAWS = 4  # of the covariates, drawn from what was released of them
_DRAWS = 2000
_LAST_STEPS = 12  # of Gauss-Newton, under each law


def posterior(
    model: GLM | Softmax | Callable[..., Any],
    *data: Any,
    epsilon: float | None = None,
    delta: float | None = None,
    accountant: PrivacyAccountant | None = None,
    num_data: int | None = None,
    public: Sequence[str | int] = (),
    covariates: Any = None,
    max_grad_norm: float | None = None,
    max_feature_norm: float = 1.0,
    constant_columns: Sequence[int] | Mapping[int, float] = (),
    num_releases: int = NUM_RELEASES,
    num_simulated: int | None = None,
    data_plate: str = "data",
) -> NoiseAwarePosterior:
    setup = Setup(
        model,
        data,
        budget_of(accountant, epsilon, delta),
        num_data,
        public,
        covariates,
        max_feature_norm,
        constant_columns,
        num_simulated,
        data_plate,
    )
    if max_grad_norm is not None:
        max_grad_norm = check_clip_bound("max_grad_norm", max_grad_norm, "the clip bound of a record's gradient")
    with using_pyro, torch.no_grad():
        return setup.infer(epsilon, delta, num_releases, max_grad_norm)


class Setup:
    """A model on its records, before anything is charged."""

    def __init__(
        self,
        model: Any,
        data: Sequence[Any],
        accountant: PrivacyAccountant,
        num_data: int | None,
        public: Sequence[str | int],
        covariates: Any,
        max_feature_norm: float,
        constant_columns: Any,
        num_simulated: int | None,
        data_plate: str,
    ) -> None:
        if isinstance(model, GLM | Softmax):
            max_feature_norm = model.max_feature_norm
            data = model.prepare(tuple(data))
            model = model_of(model, data[0])
        self.accountant = accountant
        self.count = num_simulated or _SIMULATED
        with using_pyro, torch.no_grad():
            self.records = ModelRecords(
                model,
                data,
                data_plate=data_plate,
                count_is_public=accountant.neighboring == "replace_one",
                public=public,
                chunk=_FEW,
            )
            self.latents = Latents(self.records.density.prior, self.records.read)
        self.num_data = public_num_data(num_data, self.records.density.num_records, accountant)
        self.seed = int(torch.randint(2**31, ()))
        self._given = covariates
        self._public_rows = self._rows_given() if covariates is not None else self._rows_public()
        self.shape: FeatureShape | None = None
        self.num_categories = 0
        if self._public_rows is None:
            bound = check_clip_bound("max_feature_norm", max_feature_norm, "of rows of covariates")
            rows = self.records.density.rows()
            constants = constants_of(constant_columns)
            self.shape = feature_shape(self.records, rows, bound, constants)
            categories = self.records.of_role("category")
            self.num_categories = len(categories)
            for number in categories:
                self.records.num_categories(number)

    def _rows_public(self) -> PublicRows | None:
        numbers = self.records.of_role("public")
        private = self.records.of_role("numbers", "category")
        if not numbers or private:
            if numbers:
                raise ValueError(
                    "public= names some covariates and not others: name all of them, or give"
                    " covariates= a public sample of all."
                )
            return None
        rows = self.records.density.rows()
        own = {k: self.records.rows_first(k, rows[k]) for k in numbers}
        return PublicRows(own, self.records, is_paired=True, seed=self.seed)

    def _rows_given(self) -> PublicRows:
        numbers = self.records.of_role("public", "numbers", "category")
        given = self._given if isinstance(self._given, tuple | list) else (self._given,)
        if len(given) != len(numbers):
            raise ValueError(
                f"covariates= takes one tensor for each of"
                f" {[self.records.names[k] for k in numbers]}, got {len(given)}."
            )
        own = {}
        for number, sample in zip(numbers, given, strict=True):
            like = self.records.density.made_up.few()[number]
            row = self.records.rows_first(number, torch.as_tensor(sample).to(like.dtype))
            if row.shape[1:] != self.records.rows_first(number, like).shape[1:] or not len(row):
                raise ValueError(
                    f"the public sample of {self.records.names[number]!r} has another shape than"
                    " the argument."
                )
            own[number] = row
        return PublicRows(own, self.records, is_paired=False, seed=self.seed)

    def laws(self, transcript: Transcript) -> list[Covariates]:
        """The most likely law of the covariates, and draws of it."""
        if self._public_rows is not None:
            return [self._public_rows]
        if self.shape is None and not self.num_categories:
            return [Nothing()]

        def law(noise_seed: int | None) -> Released:
            return Released(
                self.records,
                self.shape,
                transcript.moments,
                transcript.histograms,
                self.num_data,
                self.seed,
                noise_seed,
            )

        return [law(None), *(law(self.seed + 1 + k) for k in range(_LAWS))]

    def simulator(self, law: Covariates, count: int) -> Simulator:
        """Of records with covariates from ``law``."""
        return Simulator(self.records, law, self.num_data, count, self.seed)

    def plan(self, total: float, num_releases: int) -> Plan:
        """The split of the budget."""
        return plan_run(
            self.accountant,
            total,
            dimension=self.records.dimension,
            num_data=self.num_data,
            num_releases=num_releases,
            has_numbers=self.shape is not None,
            num_categories=self.num_categories,
        )

    def infer(
        self,
        epsilon: float | None,
        delta: float | None,
        num_releases: int,
        max_grad_norm: float | None,
    ) -> NoiseAwarePosterior:
        """Charges, releases, and draws from the posterior."""
        plan = self.plan(total_multiplier(self.accountant, epsilon, delta), num_releases)
        start = self.latents.start  # before the charge: a prior that fails costs nothing
        if not self.records.density.has_gradients(start.to(self.latents.prior.dtype)):
            raise ValueError(
                "the model cannot be evaluated at the median of its prior, where the run starts:"
                " use a prior that suits the likelihood."
            )
        self.accountant.compose(plan.event, label=_LABEL)
        mechanism = Mechanism(self.records, self.shape)
        transcript = mechanism.covariates(plan)
        laws = self.laws(transcript)
        in_run = self.simulator(laws[0], min(self.count, _SIMULATED_IN_RUN))
        transcript, theta = run(
            mechanism, transcript, in_run, self.latents, plan, max_grad_norm
        )
        return self.draw(transcript, laws, theta)

    def draw(
        self, transcript: Transcript, laws: Sequence[Covariates], theta: Tensor
    ) -> NoiseAwarePosterior:
        """The posterior given the releases."""
        few = max(_FEW, _FEW_PER_DIMENSION * self.records.dimension)
        likelihoods: list[SyntheticLikelihood] = []
        for law in laws[-_LAWS:]:
            # the mode by few records, the moments there by all of them
            rough = self.simulator(law, min(self.count, _SIMULATED_IN_RUN))
            theta = find_mode(rough, transcript.scores, self.latents, theta, _LAST_STEPS).centre
            simulator = self.simulator(law, self.count)
            fit = find_mode(simulator, transcript.scores, self.latents, theta, 0)
            likelihoods.append(
                SyntheticLikelihood(
                    simulator, transcript.scores, fit, few=few, most_batches=_MOST_BATCHES
                )
            )
            if len(likelihoods) == 1:
                known = fit, transcript.scores, self.latents, self.num_data
                checks = release_p_values(*known), prior_p_value(*known)
        found = draw_posterior(self.latents, likelihoods, _DRAWS)
        statement = [
            f"Noise-aware posterior from {len(transcript.scores)} releases of clipped scores",
            *statement_of_charge(self.accountant, self._released(transcript)),
            *note(*checks),
        ]
        return NoiseAwarePosterior(
            self.latents, found, likelihoods, statement, transcript, checks
        )

    def _released(self, transcript: Transcript) -> list[str]:
        lines = [
            f"{len(transcript.scores)} clipped sums; a record moves each by at most 1 in units of"
            " its clip bound"
        ]
        if self.shape is not None:
            lines.append(
                f"mean and products of covariates; rows longer than {self.shape.bound:g}"
                " (max_feature_norm) are shortened to it, and parameters are those of shortened"
                " rows"
            )
        if self.num_categories:
            lines.append("a histogram of each category")
        return lines

# -- models by name --------------------------------------------------------------------------------


def model_of(model: GLM | Softmax, features: Tensor) -> Callable[..., None]:
    """The Pyro model of a generalised linear model, or of a multinomial logistic regression."""
    if isinstance(model, Softmax):
        return _SoftmaxModel(model.num_classes, model.prior_std, features.shape[1])
    precision = model.prior_precision.expand(features.shape[1])
    if not bool((precision > 0).all()):
        raise ValueError(
            "the prior is improper (prior_std is infinite): where noise hides the data the"
            " posterior is the prior. State prior_std."
        )
    noise_std = model.noise_std if model.family == "gaussian" else None
    return _LinearModel(model.family, precision.rsqrt().clone(), noise_std)


class _LinearModel:
    def __init__(self, family: str, prior_std: Tensor, noise_std: float | None) -> None:
        self._family, self._prior_std, self._noise_std = family, prior_std, noise_std

    def __call__(self, features: Tensor, targets: Tensor) -> None:
        scale = self._prior_std.to(features)
        weights = pyro.sample("weights", dist.Normal(torch.zeros_like(scale), scale).to_event(1))
        with pyro.plate("data", len(targets)):
            predictor = features @ weights
            if self._family == "bernoulli":
                law: Any = dist.Bernoulli(logits=predictor)
            elif self._family == "poisson":
                law = dist.Poisson(predictor.clamp(max=50.0).exp())
            else:
                law = dist.Normal(predictor, self._noise_std)
            pyro.sample("targets", law, obs=targets)


class _SoftmaxModel:
    def __init__(self, num_classes: int, prior_std: float, num_columns: int) -> None:
        self._shape, self._prior_std = (num_classes, num_columns), prior_std

    def __call__(self, features: Tensor, targets: Tensor) -> None:
        zeros = torch.zeros(self._shape, dtype=features.dtype, device=features.device)
        weights = pyro.sample("weights", dist.Normal(zeros, self._prior_std).to_event(2))
        with pyro.plate("data", len(targets)):
            pyro.sample("targets", dist.Categorical(logits=features @ weights.T), obs=targets)
