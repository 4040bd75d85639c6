"""The public functions: a private run with its noise-aware posterior, and the forecast of a run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..accounting.accountant import PrivacyAccountant
from ..accounting.events import positive_count
from ..density.pyro_runs import UnfitModel, first_line, using_pyro
from ..errors import ArgumentError, ArgumentTypeError
from ..noise import check_clip_bound
from ..ops.glm import GLM
from ..ops.softmax import Softmax
from . import checks
from .covariates import (
    CategoryLaw,
    Covariates,
    FeatureShape,
    Released,
    constants_of,
    feature_shape,
    has_combinations,
    law_draws,
    num_ones,
    public_rows,
    uniform_law,
)
from .drawing import draw_posterior, seconds_of, seconds_of_chains
from .last_layer import OF_OTHER_MODELS, SMALLEST, posterior_of_large_layer
from .latents import Latents
from .likelihood import (
    LawDifferences,
    Moves,
    Release,
    Simulator,
    SyntheticLikelihood,
    find_mode,
    is_bent,
    law_differences,
)
from .models import LastLayer, Likelihood, model_of, targets_of
from .records import LARGEST_DIMENSION, POINTS, ModelRecords, log_likelihoods, scores
from .result import NoiseAwarePosterior
from .run import (
    NUM_RELEASES,
    Mechanism,
    Transcript,
    budget_of,
    choose_scale,
    plan_run,
    public_num_data,
    require_near,
    run,
    statement_of_charge,
    statement_of_releases,
)

_LABEL = "noise_aware.posterior"
# records for moments at the mode, for steps in a run, and under each law of the covariates
_SIMULATED, _SIMULATED_IN_RUN, _SIMULATED_UNDER_LAW = 40_000, 8_000, 2_000
_LEAST_SIMULATED = 500
_NEAR = 0.1  # usual change of a linear predictor where scores are linear in the rows
_FEW = 4000  # simulated records whose weights are computed for each draw
_FEW_PER_DIMENSION = 40
_MOST_BATCHES = 50  # of simulated records for the mean at the centre
# draws of the covariates' law given its release: half of them weight the releases, the others
# estimate a variance between laws up to a quarter, √(2/32)
_LAWS = 64
_DRAWS = 2000
_FORECASTS = 5  # draws of the prior
_ADVICE = (
    "use a prior that is narrower or has fewer modes, or more simulated records (num_simulated=)."
)
_MOMENTS = 160  # a run takes about as long as this number of moments of _FORECASTS releases


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
) -> NoiseAwarePosterior:
    r"""The posterior of a model's parameters given noisy clipped scores; it includes the noise.

    A run releases Σ clip(A u(x; θ)/C) with noise, seven times, each at the most probable θ so far.
    u is the score, the gradient of a record's log density. The likelihood of these releases is
    simulated: records are drawn from the model, and their scores whitened, clipped and summed in
    the same way (:mod:`~torch_dpbayes.noise_aware.likelihood`). At a small ε the posterior is close
    to the prior, at a large ε to the posterior given the records.

    Args:
        model: a Pyro model with one plate, named "data", that takes its data as arguments and whose
            records can be simulated; an ``ops.GLM`` or an ``ops.Softmax``.
        data: the model's arguments; features ``[n, d]`` and targets ``[n]`` of a GLM or Softmax.
            Arguments that the model observes are simulated; all others with a row for each record
            are covariates.
        epsilon: the accountant's total ε after the run. None: the accountant's budget.
        delta: δ of this ε. None: the accountant's.
        accountant: where the run is charged. None: a new one for replace-one.
        num_data: the number of records, a public constant. None: the number in the data, only
            under replace-one, where it is public.
        public: names or positions of the covariates, if they are public: all of them or none. The
            posterior is then conditional on their rows, and neighbours differ only in what one
            record observes: this needs replace-one.
        covariates: a public sample of rows in place of the private ones, a tensor for each
            covariate. None: statistics of the private covariates are released with noise: mean and
            second moments of floats, counts of each category and of combinations, and sums of the
            floats of each category.
        max_grad_norm: a clip bound of a record's score, which is then not whitened. None: chosen by
            simulation before each release.
        max_feature_norm: R; private rows of floats (all columns together, except constant ones) are
            scaled down to it everywhere. Ignored for a GLM, which has its own.
        constant_columns: indices of columns of ones, or a dict from a column's index to its value.
            The columns are set to this value for all records.
        num_releases: the number of score releases.
        num_simulated: number of records that are simulated for moments at the mode, at least 500.
            None: 40,000, or more if the simulation's error is not small.

    Raises:
        ValueError, TypeError: the model, the shapes or a number do not fit. Nothing is charged.
        PrivacyBudgetExceeded: the run would exceed the accountant's budget. Nothing is released.

    **Privacy.** Everything is charged before the first release, by one ``GaussianDpEvent(z)`` for
    each. In the list, the first sensitivity is for adding or removing a record, the second (in
    brackets) for replacing one:

    * each clipped sum, of vectors with norm at most 1 in units of C: 1 (2);
    * three times the mean of the floats, in units of its bound: 1 (2); and three times their second
      moments: 1 (√2);
    * one vector with the counts of categories, the counts of combinations, and the sums of floats
      of each category: √(2m + 1) (√(4m + 2)) for m arguments that are categories; less without
      floats or combinations;
    * the number of clipped records at the end: 1 (1).

    Points, whitening matrices and clip bounds are computed from earlier releases. A record whose
    density or score is not finite counts as 0. Nothing else depends on records: errors before the
    charge depend only on the model, shapes, types and public rows.
    """
    budget, counts = (epsilon, delta, accountant, num_data), (num_releases, num_simulated)
    rows = public, covariates, max_feature_norm, constant_columns
    with using_pyro, torch.no_grad():
        return Setup(model, data, *budget, *rows, *counts).infer(max_grad_norm)


def posterior_for_module(
    module: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    likelihood: Likelihood,
    prior_std: float,
    **options: Any,
) -> NoiseAwarePosterior:
    """:func:`posterior` for the last layer of a network; its other parameters are frozen and
    public. Draws have the parameters' names.

    Args:
        module: its only trainable parameters are those of a ``torch.nn.Linear``, the last layer.
        inputs: floats with the records along dimension 0.
        targets: ``[n]`` or a column ``[n, 1]``: labels for ``"categorical"``, 0 and 1 for
            ``"bernoulli"``; ``[n, K]`` for K > 2 means.
        likelihood: ``"categorical"`` (an output for each class), ``"bernoulli"`` (one logit) or
            ``"normal"`` (a mean, or K > 2 means, with variance 1; or a mean and a log variance).
        prior_std: standard deviation of the N(0, prior_std²) prior of every weight and bias.
        options: as for :func:`posterior`. The inputs of the layer are the covariates. A layer of
            classes with more than 50 parameters is sampled by Hamiltonian chains
            (:mod:`~torch_dpbayes.noise_aware.last_layer`) if the only options are the budget,
            ``num_data``, ``max_feature_norm``, ``num_releases`` (5) and ``num_simulated``
            (6,000 or more). Otherwise a layer may have at most 500 parameters.

    Raises: as for :func:`posterior`.

    **Privacy.** As for :func:`posterior`. Each row of features is a function of its own record.
    """
    with using_pyro, torch.no_grad():
        _require_known(options, "posterior_for_module")
        layer = LastLayer(module, likelihood, prior_std)
        if isinstance(targets, Tensor) and targets.dim() == 2 and targets.shape[1] == 1:
            targets = targets[:, 0]
        features = layer.features(inputs)
        size = sum(p.numel() for p in layer.linear.parameters())
        is_large = likelihood == "categorical" and size > SMALLEST
        others = sorted(OF_OTHER_MODELS.intersection(options))
        if is_large and others and size > LARGEST_DIMENSION:
            raise ArgumentError(
                f"leave out {others[0]}=: with it, a layer may have at most {LARGEST_DIMENSION}"
                f" parameters, and this one has {size}."
            )
        if is_large and not others:
            found = posterior_of_large_layer(layer, features, targets, **options)
        else:
            bound = options.pop("max_grad_norm", None)
            found = Setup(layer, (features, targets), **options).infer(bound)
    found.likelihood = likelihood
    if likelihood == "normal" and layer.linear.out_features != 2:
        found.noise_std = 1.0
    return found


_OPTIONS = tuple(inspect.signature(posterior).parameters)[2:]


def _require_known(options: Mapping[str, Any], name: str, *others: str) -> None:
    known = [option for option in _OPTIONS if option not in others]
    for option in options:
        if option not in known:
            raise ArgumentTypeError(f"{name} has no option {option!r}: use {', '.join(known)}.")


@dataclass(frozen=True)
class Forecast:
    """The expected result of a run.

    Attributes:
        stddev: expected posterior standard deviations ``[d]`` of the latents in the likelihood,
            in unconstrained space, sites sorted by name. True values are drawn from the prior.
        prior_stddev: standard deviations of the prior, ``[d]``.
        clip_bound: clip bound of whitened scores near the true values.
        noise_multiplier: noise multiplier of all releases of scores together.
        seconds: estimated time on one core. A model that is not hierarchical, but needs chains,
            takes longer.
    """

    stddev: Tensor
    prior_stddev: Tensor
    clip_bound: float
    noise_multiplier: float
    seconds: float


def plan(
    model: Any,
    *data: Any,
    epsilon: float | None = None,
    delta: float | None = None,
    accountant: PrivacyAccountant | None = None,
    **options: Any,
) -> Forecast:
    """Predict widths, clip bound and seconds of a run by simulation from the prior, before any
    charge. Standard deviations are in unconstrained space, sites sorted by name.

    Args: as for :func:`posterior`, without ``max_grad_norm``. Private covariates are not read: rows
        of floats are assumed spherical with norm R, categories equally frequent.

    **Privacy.** Nothing is charged or released. Only shapes, types and public rows are read.
    """
    _require_known(options, "plan", "max_grad_norm")
    with using_pyro, torch.no_grad():
        setup = Setup(model, data, epsilon=epsilon, delta=delta, accountant=accountant, **options)
        simulator, latents = setup.simulator(setup.assumed_law()), setup.latents
        scales, releases = [], []
        for theta in latents.sample(_FORECASTS):
            scale = choose_scale(simulator, latents, theta, setup.plan.together, None)
            scales.append(scale)
            value = torch.zeros(len(scale.variances), dtype=torch.float64)
            releases.append(Release(theta, scale.whitening, value, setup.plan.together))
        near = simulator.at(latents.median, setup.few)
        is_curved = is_bent(near, setup.records)
        some = near.density
        seconds = _MOMENTS * seconds_of(lambda: simulator.local(latents.median, releases))
        few = latents.median.repeat(POINTS, 1)
        seconds += _DRAWS / POINTS * seconds_of(lambda: log_likelihoods(some, few))
        if latents.is_hierarchical or is_curved:
            seconds += seconds_of_chains(latents, Moves(near) if is_curved else None)
    variances = torch.stack([scale.variances for scale in scales]).mean(0)
    bounds = torch.tensor([scale.clip_bound for scale in scales])
    return Forecast(
        variances.sqrt(),
        latents.stddev[latents.read],
        float(bounds.median()),
        setup.plan.together,
        seconds,
    )


class Setup:
    """A model and its records, before any charge. Arguments as for :func:`posterior`."""

    def __init__(
        self,
        model: Any,
        data: Sequence[Any],
        epsilon: float | None = None,
        delta: float | None = None,
        accountant: PrivacyAccountant | None = None,
        num_data: int | None = None,
        public: Sequence[str | int] = (),
        covariates: Any = None,
        max_feature_norm: float = 1.0,
        constant_columns: Any = (),
        num_releases: int = NUM_RELEASES,
        num_simulated: int | None = None,
    ) -> None:
        self.accountant = budget_of(accountant, epsilon, delta)
        # standard deviation of a record's log ratio under the prior, for rows of norm 1
        spread = model.prior_std if isinstance(model, LastLayer) else 0.0
        if isinstance(model, GLM | Softmax):
            max_feature_norm = model.max_feature_norm
            spread = float(model.prior_precision.min() ** -0.5)
            if isinstance(model, GLM):
                spread *= model.record_smoothness(1.0) ** 0.5 / max_feature_norm
            data = targets_of(model, *model.prepare(tuple(data)))
            model = model_of(model, data[0].shape[1])
        self.count = _SIMULATED
        if num_simulated is not None:
            self.count = max(positive_count(num_simulated, "num_simulated"), _LEAST_SIMULATED)
        is_swap = self.accountant.neighboring == "replace_one"
        self.records = ModelRecords(
            model, data, count_is_public=is_swap, public=public, chunk=min(_FEW, self.count)
        )
        if self.records.of_role("public") and not is_swap:
            raise ArgumentError(
                "public= reveals which records there are, but this accountant's neighbours add or"
                " remove one: use PrivacyAccountant(neighboring='replace_one')."
            )
        self.latents = Latents(self.records.density.prior, self.records.read)
        self.few = max(_FEW, _FEW_PER_DIMENSION * len(self.records.read))
        found = self.records.density.num_records
        self.num_data = public_num_data(num_data, found, self.accountant)
        # seeds of independent streams: covariates, their laws, and records given covariates
        self.seed, self.seed_of_laws, self.seed_of_records = torch.randint(2**40, (3,)).tolist()
        self._public_rows = public_rows(self.records, covariates, self.seed)
        self.shape: FeatureShape | None = None
        self.categories: dict[int, int] = {}
        if self._public_rows is None:
            bound = check_clip_bound("max_feature_norm", max_feature_norm, "of rows of covariates")
            self.shape = feature_shape(self.records, bound, constants_of(constant_columns))
            require_near(spread * bound if self.shape is not None else 0.0, bound)
            self.categories = self.records.categories()
        self.plan = plan_run(
            self.accountant,
            epsilon,
            delta,
            dimension=len(self.records.read),
            num_data=self.num_data,
            num_releases=num_releases,
            has_numbers=self.shape is not None,
            num_ones=num_ones(self.categories, self.shape is not None),
        )
        # before the charge: a model that fails costs nothing
        start = self.latents.median
        if not self.records.density.has_gradients(start.to(self.latents.prior.dtype)):
            raise ArgumentError(
                "the run starts at the median of the prior, but the model cannot be evaluated"
                " there: use a prior that fits the likelihood."
            )
        rows = self.assumed_law().rows(_LEAST_SIMULATED, 0)
        require_near(self._spread(start, rows), None if self.shape is None else self.shape.bound)
        try:
            self.records.simulate(start, rows, _LEAST_SIMULATED, self.seed_of_records)
        except Exception as error:
            raise UnfitModel(
                f"records cannot be simulated: {first_line(error)}. Observe distributions that can"
                " be sampled. If Gaussian covariates do not fit, write, for example,"
                " rate.clamp(min=1e-6), or pass covariates=, a public sample."
            ) from error

    def _spread(self, start: Tensor, rows: Mapping[int, Tensor]) -> float:
        """Standard deviation of a record's log ratio under the prior, as far as it is due to rows
        of floats and linear in them: scores of rows near 0, less those of 0, extrapolated. At the
        rows themselves most records may be certain, with scores of 0. 0 if it is not linear.
        """
        numbers = [k for k, row in rows.items() if row.is_floating_point()]
        squares = sum(float(rows[k].double().square().sum()) for k in numbers)
        if not 0 < squares < math.inf:
            return 0.0
        std, found = self.latents.stddev[self.latents.read], []
        near = _NEAR / (float(std.max()) * math.sqrt(squares / _LEAST_SIMULATED))
        for scale in (near, near / 2):
            own = [{k: by * rows[k] for k in numbers} for by in (scale, 0.0)]
            try:
                drawn = self.records.simulate(
                    start, {**rows, **own[0]}, _LEAST_SIMULATED, self.seed_of_records
                )
            except Exception:  # the model does not take such rows
                return 0.0
            at_0 = drawn.with_rows([own[1].get(k, row) for k, row in enumerate(drawn.rows())])
            apart = scores(self.records, drawn, start) - scores(self.records, at_0, start)
            found.append(float((apart * std).square().sum(1).mean().sqrt()))
        is_linear = 1.5 < found[0] / max(found[1], 1e-300) < 2.5
        return found[0] / near if is_linear else 0.0

    def laws(self, transcript: Transcript) -> list[Covariates]:
        """The mean law of the covariates, and draws of the law given the release."""
        if self._public_rows is not None:
            return [self._public_rows]
        n, moments, categories = self.num_data, transcript.moments, transcript.categories
        count = _LAWS if moments or categories else 0
        found: Sequence[tuple[Tensor, Tensor] | None] = [None] * (count + 1)
        laws: Sequence[CategoryLaw | None] = [None] * (count + 1)
        if moments:
            found = law_draws(moments, n, count, self.seed_of_laws)
        if categories is not None:
            laws = categories.laws(n, found, self.seed_of_laws)
        given = zip(found, laws, strict=True)
        return [Released(self.records, self.seed, self.shape, *each) for each in given]

    def assumed_law(self) -> Covariates:
        """The distribution of covariates that a forecast assumes."""
        if self._public_rows is not None:
            return self._public_rows
        moments = None
        if self.shape is not None:
            eye = torch.eye(len(self.shape.free), dtype=torch.float64)
            moments = 0 * eye[0], 0.9 / len(eye) * eye
        law = uniform_law(self.categories)
        return Released(self.records, self.seed, self.shape, moments, law)

    def simulator(self, law: Covariates, most: int = _SIMULATED_IN_RUN) -> Simulator:
        """A simulator of at most ``most`` records with covariates from ``law``."""
        count = min(self.count, most)
        return Simulator(self.records, law, self.num_data, count, self.seed_of_records)

    def infer(self, max_grad_norm: float | None) -> NoiseAwarePosterior:
        """Charge, release, and draw from the posterior."""
        if max_grad_norm is not None:
            max_grad_norm = check_clip_bound(
                "max_grad_norm", max_grad_norm, "the clip bound of a record's gradient"
            )
        plan = self.plan
        self.accountant.compose(plan.event, label=_LABEL)
        mechanism = Mechanism(
            self.records, self.shape, self.categories, self.num_data, self.seed_of_laws
        )
        transcript = mechanism.covariates(plan)
        laws = self.laws(transcript)
        transcript, theta = run(
            mechanism, transcript, self.simulator(laws[0]), self.latents, plan, max_grad_norm
        )
        self.records.forget()
        n, releases = self.num_data, transcript.scores
        # few records for the mode, all records for the moments there
        reached = find_mode(self.simulator(laws[0]), releases, self.latents, theta)
        simulator = self.simulator(laws[0], self.count)
        fit = find_mode(simulator, releases, self.latents, reached.centre, 0)
        under_laws = [self.simulator(law, _SIMULATED_UNDER_LAW) for law in laws]
        checked = [*releases, self._count_of_clipped(transcript)]
        of_all = find_mode(simulator, checked, self.latents, fit.centre, 0)
        differences = law_differences(of_all, under_laws, checked)
        of_scores = LawDifferences(differences.means[:, :-1], differences.jacobians[:, :-1])
        likelihood = SyntheticLikelihood(
            simulator, releases, fit, of_scores, few=self.few, most_batches=_MOST_BATCHES
        )
        mean, spread = likelihood.modes.mean(0), likelihood.covariance()
        p_values = (
            checks.release_p_values(of_all, checked, self.latents, n, differences, spread),
            checks.prior_p_value(fit, self.latents, mean, spread),
        )
        found = draw_posterior(self.latents, likelihood, _DRAWS)
        bound = None if self.shape is None else self.shape.bound
        lines = statement_of_releases(len(releases), bound, self.categories)
        statement = [
            f"Noise-aware posterior from {len(releases)} releases of clipped scores",
            *statement_of_charge(self.accountant, lines),
            *self._assumed(),
            *checks.note_releases(p_values[0]),
            *checks.note_prior(p_values[1]),
            *checks.note_clipped(transcript.clipped, n),
            *checks.note_mode(reached.last_step),
            *checks.note_prior_width(found, self.latents),
            *checks.note_draws(found, _ADVICE),
            *checks.note_simulation(likelihood),
        ]
        values = self.latents.values(found.theta, found.weights)
        density = self.latents, likelihood
        return NoiseAwarePosterior(
            found, values, statement, transcript, p_values, density, self.shape
        )

    def _count_of_clipped(self, transcript: Transcript) -> Release:
        """The number of clipped records as a release. Rows with longer tails than simulated ones,
        for example, have another. If none of M simulated records is clipped, about n/M real ones
        may be: the noise includes that.
        """
        count, noise = transcript.clipped
        missed = self.num_data / self.count
        return transcript.scores[-1]._replace(
            value=torch.tensor([count], dtype=torch.float64),
            noise_std=math.sqrt(noise**2 + missed**2 + missed),
            is_count=True,
        )

    def _assumed(self) -> list[str]:
        """Lines that state what the simulation assumes of covariates."""
        lines = []
        if self.categories and self.shape is not None:
            lines.append("categories shift means of floats by additive effects; one covariance")
        if has_combinations(self.categories):
            lines.append("combinations hidden by noise differ at random from independent ones")
        elif len(self.categories) > 1:
            lines.append("categories are independent: their combinations are too many to count")
        return [f"  ASSUMED     {line}" for line in lines]
