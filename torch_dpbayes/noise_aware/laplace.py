"""The front door: a private run on a model's records, and the posterior that knows its noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from ..accounting.accountant import PrivacyAccountant
from ..mcmc.checks import check_clip_bound
from ..mcmc.density import RecordDensity
from ..ops.glm import GLM
from ..ops.models import Loss, using_pyro
from ..ops.pyro_model import model_of_module, require_module
from ..ops.softmax import Softmax
from .arguments import budget_of, little_left, public_num_data, require_small, shortened_rows
from .coupled_outputs import couples_outputs
from .diagonal import run_diagonal
from .learned_curvature import LARGEST_DIMENSION
from .mechanism import DiagonalSums, GeneralSums, PrivateSums, charge
from .newton import run_general, run_glm
from .planning import (
    Plan,
    diagonal_plan,
    general_plan,
    glm_plan,
    logistic_bound,
    total_multiplier,
)
from .posterior import (
    Coordinates,
    DiagonalPosterior,
    FlatCoordinates,
    MatrixCoordinates,
    Mixture,
    NoiseAwarePosterior,
    PyroCoordinates,
)
from .priors import GaussianPrior, LatentPrior, PyroPrior
from .records import DensitySums, GLMSums, SoftmaxSums
from .transcript import Transcript
from .turned import OfTold, Turn, TurnedMixture
from .warn import warn

Curvature = Literal["full", "diagonal"]
_LABEL = "noise_aware.laplace"
_DIAGONAL = 'write curvature="diagonal"'
_BOUND = "the clip bound of a record's gradient"
# the share of the bound that a clipped gradient loses, if all lose it to the same side: of a normal
# tail beyond two deviations .19, of an exponential one beyond three .33
_LOST = 1 / 3
_SURELY = 2.0  # standard deviations of the number of clipped gradients
_LARGE_PREDICTORS = 6.0  # their standard deviation
_NO_ANSWER = 0.5  # standard deviation of a share


def laplace(
    model: GLM | Softmax | Callable[..., Any],
    *data: Any,
    epsilon: float | None = None,
    delta: float | None = None,
    accountant: PrivacyAccountant | None = None,
    max_grad_norm: float | None = None,
    num_data: int | None = None,
    data_plate: str = "data",
    curvature: Curvature = "full",
) -> NoiseAwarePosterior:
    r"""The posterior of a model's parameters given a private run of Newton's method, its noise
    included.

    A run releases noisy clipped gradients and a noisy curvature. What they say about θ is a
    Gaussian likelihood whose covariance counts the records' own randomness, the noise on the
    gradients and that on the curvature (:class:`~torch_dpbayes.noise_aware.surrogate.Surrogate`);
    times the prior it is the posterior. At a small ε it is close to the prior, at a large one close
    to the posterior of the records.

    Args:
        model: a :class:`~torch_dpbayes.ops.GLM`, a :class:`~torch_dpbayes.ops.Softmax`, or a Pyro
            model with one data plate that takes its data as arguments
            (:class:`~torch_dpbayes.mcmc.density.RecordDensity` says what it may hold; records count
            once, without ``poutine.scale``).
        data: features ``[n, d]`` and targets ``[n]`` of a GLM or of classes, the arguments of a
            Pyro model. Rows of features longer than the model's ``max_feature_norm`` are shortened
            to it, and the weights are those of shortened rows.
        epsilon: of everything on the accountant after the run. None: the accountant's budget.
        delta: likewise.
        accountant: where the run is charged. None: one of its own, for neighbours that replace one
            record.
        max_grad_norm: C, a public bound to which every record's gradient is clipped, in
            unconstrained space. A tight one that clips few gradients is best. None: for classes,
            where gradients have a bound of their own. Those of a logistic regression are then
            clipped to R_x/2, and from n/(zd) = 500 on to R_x, which clips none; z is the noise
            multiplier of the one release that would use the budget up.
        num_data: the number of records, a public constant. None: taken from the data under
            replace-one, where it is public.
        data_plate: the name of a Pyro model's plate of records.
        curvature: ``"full"``, d² numbers, up to 4000 parameters; or ``"diagonal"``, d numbers, for
            more: the posterior's coordinates are then independent of each other
            (:class:`~torch_dpbayes.noise_aware.diagonal.DiagonalSurrogate`), and the prior counts
            as a Gaussian with its quantiles: without ``pyro.factor`` and ``poutine.scale``. Not
            for Softmax.

    Raises:
        ValueError, TypeError: the model, the shapes or a number do not fit. Nothing is charged.
        PrivacyBudgetExceeded: the run would pass the accountant's budget. Nothing is released.

    **Privacy.** Everything is charged before the first release: a ``GaussianDpEvent`` for each
    gradient, whose sum moves by C when a record is added or removed and by 2C when one is replaced,
    and for each matrix, whose sum moves by its bound B or by √2·B. Bounds are R_x² for the Gram
    matrix of a GLM, R_x²·max b'' for its Hessian, ½R_x² for that of a softmax, whose gradients have
    C = √2·R_x, and C² for Σ c cᵀ of clipped gradients. The diagonal of a matrix has that matrix's
    bound: ‖c∘c‖² = Σ e_j⁴ ≤ (Σ e_j²)² ≤ C⁴ for the entries e_j of c, and √2·C² when a record is
    replaced, as no entry of c∘c is negative. A run of a GLM in other coordinates of the features
    (:mod:`~torch_dpbayes.noise_aware.feature_shape`) weights rows to norm 1 at most there: the
    bounds are then C/R_x, 1 and max b'', under the same noise multipliers. A histogram of the rows'
    lengths there is charged for too: a record is in one bin, and one that is replaced moves it by
    √2. Of Pyro models and modules the number of clipped gradients at the last point is released,
    which a record moves by 1; the price is that of such a histogram. Where parameters are of groups
    and noise hides how large their curvatures are, the sums of the diagonal of each Σ c cᵀ over
    each site are released besides: a record's are ‖c‖² ≤ C² together, and none is negative, so that
    they cost as much as a matrix of that noise multiplier.
    """
    is_diagonal = _is_diagonal(curvature)
    accountant = budget_of(accountant, epsilon, delta)
    if isinstance(model, GLM):
        if len(data) != 2:
            raise TypeError(f"a GLM takes features and targets, got {len(data)} arguments")
        if max_grad_norm is not None:
            max_grad_norm = check_clip_bound("max_grad_norm", max_grad_norm, _BOUND)
        sums = GLMSums(model, *data, max_grad_norm)
        count = public_num_data(num_data, sums.num_records, accountant)
        if max_grad_norm is None:
            total = total_multiplier(accountant, epsilon, delta)
            sums = sums.clipped_at(
                logistic_bound(total, sums.dimension, count, model.max_feature_norm)
            )
        if is_diagonal:
            return _diagonal(
                sums,
                sums.prior,
                FlatCoordinates("weights"),
                epsilon,
                delta,
                accountant,
                num_data,
            )
        require_small(sums.dimension, f"{_DIAGONAL}, or use fewer features")
        multiplier = total_multiplier(accountant, epsilon, delta)
        plan = glm_plan(
            multiplier, sums.dimension, count, accountant.neighboring, quadratic=sums.is_quadratic
        )
        held_before = little_left(accountant, epsilon, delta)
        charge(accountant, plan, _LABEL)
        surrogate, transcript = run_glm(sums, plan, count)
        statement = _statement(
            accountant,
            plan,
            sums,
            "features are taken as Gaussian where the curvature away from the last point is needed",
        )
        if transcript.feature_map is not None:
            statement.append(
                "  coordinates after the first Gram matrix features are Ax, weighted to norm 1 at"
                " most, with the noise for that: transcript.feature_map. Where the model is not"
                " quite right, the weights move what fits best"
            )
        statement += _note_large(surrogate.predictor_std)
        return NoiseAwarePosterior(
            surrogate,
            sums.prior,
            FlatCoordinates("weights"),
            statement,
            transcript=transcript,
            agreement=surrogate.agreement,
            little_left=held_before,
        )
    if isinstance(model, Softmax):
        if len(data) != 2:
            raise TypeError(f"Softmax takes features and labels, got {len(data)} arguments")
        if max_grad_norm is not None:
            raise ValueError(
                "gradients of a Softmax have a bound of their own and are not clipped: leave out"
                " max_grad_norm, and choose max_feature_norm."
            )
        if is_diagonal:
            raise ValueError(
                'a Softmax has the full curvature only: leave out curvature="diagonal".'
            )
        of_classes = SoftmaxSums(model, *data)
        require_small(
            of_classes.dimension,
            "a Softmax has no diagonal form: use fewer features, or"
            ' laplace_for_module(torch.nn.Linear(...), ..., curvature="diagonal")',
        )
        return _general(
            of_classes,
            of_classes.prior_of_weights,
            of_classes.prior,
            MatrixCoordinates("weights", model.num_classes),
            epsilon,
            delta,
            accountant,
            num_data,
            of_classes.turn,
        )
    if not callable(model) or isinstance(model, type):
        raise TypeError(
            f"model must be a dpb.ops.GLM, a dpb.ops.Softmax or a Pyro model, got {model!r}"
        )
    if isinstance(model, nn.Module) and not isinstance(model, PyroModule):
        raise TypeError(
            "for a torch module use noise_aware.laplace_for_module(net, inputs, targets, loss=...,"
            " prior_std=..., max_grad_norm=...)"
        )
    if max_grad_norm is None:
        raise ValueError(
            "the gradients of a Pyro model have no bound of their own: state max_grad_norm, a"
            " public number that few of them exceed."
        )
    bound = check_clip_bound("max_grad_norm", max_grad_norm, _BOUND)
    with using_pyro, torch.no_grad():
        density = RecordDensity(
            model,
            data,
            data_plate=data_plate,
            count_is_public=accountant.neighboring == "replace_one",
        )
        if is_diagonal:
            _require_prior_as_drawn(density)
        else:
            require_small(density.prior.dimension, _DIAGONAL)
        prior = PyroPrior(density.prior)
        return _of_density(
            density,
            prior,
            prior.gaussian(),
            bound,
            epsilon,
            delta,
            accountant,
            num_data,
            is_diagonal,
        )


def laplace_for_module(
    module: nn.Module,
    inputs: Any,
    targets: Any,
    *,
    loss: Loss,
    prior_std: float,
    max_grad_norm: float,
    epsilon: float | None = None,
    delta: float | None = None,
    accountant: PrivacyAccountant | None = None,
    num_data: int | None = None,
    curvature: Curvature = "full",
) -> NoiseAwarePosterior:
    """The same for the trainable parameters of a torch module, up to a few thousand of them, or
    more with ``curvature="diagonal"``; draws are by parameter name.

    Args:
        module: ``module(inputs)`` has the records along dimension 0, and no record looks at
            another. Frozen parameters and buffers count as public: they must not come from the
            records.
        inputs, targets: the records.
        loss: −log p(target | input) of each record, up to a constant: ``loss(module(inputs),
            targets)`` returns ``[n]``.
        prior_std: standard deviation of the N(0, prior_std²) prior of every trainable parameter.
        max_grad_norm, epsilon, delta, accountant, num_data, curvature: as for :func:`laplace`.

    Raises: as for :func:`laplace`.

    **Privacy.** As for :func:`laplace`. What parameters have in common and no record tells, as
    those of the classes of a softmax, is set apart by a reflection, which leaves gradients as long
    as they are; it is found on made-up rows (:mod:`~torch_dpbayes.noise_aware.turned`).
    """
    require_module(module)
    is_diagonal = _is_diagonal(curvature)
    if not is_diagonal:
        require_small(
            sum(p.numel() for p in module.parameters() if p.requires_grad),
            f"{_DIAGONAL}, or freeze all but the last layer (requires_grad_(False))",
        )
    bound = check_clip_bound("max_grad_norm", max_grad_norm, _BOUND)
    accountant = budget_of(accountant, epsilon, delta)
    with using_pyro, torch.no_grad():
        density = RecordDensity(
            model_of_module(module, loss, prior_std),
            (inputs, targets),
            count_is_public=accountant.neighboring == "replace_one",
        )
        size = density.prior.dimension
        prior = GaussianPrior(
            torch.zeros(size, dtype=torch.float64),
            torch.full((size,), prior_std**-2, dtype=torch.float64),
        )
        found = _of_density(
            density,
            prior,
            prior,
            bound,
            epsilon,
            delta,
            accountant,
            num_data,
            is_diagonal,
        )
    if is_diagonal and couples_outputs(module, loss, inputs, targets, found.transcript.turned):
        warn(
            "the loss couples a record's outputs, and a diagonal curvature takes them for"
            " independent: intervals are too narrow. Give a softmax an output for every class, or"
            ' use curvature="full".'
        )
    return found


def _of_density(
    density: RecordDensity,
    prior: LatentPrior,
    gaussian: GaussianPrior,
    max_grad_norm: float,
    epsilon: float | None,
    delta: float | None,
    accountant: PrivacyAccountant,
    num_data: int | None,
    is_diagonal: bool,
) -> NoiseAwarePosterior:
    # the noise of sums that are 0 in any case would be taken for something that the records say
    places = density.zero_sums()
    if is_diagonal:  # coordinates of φ depend on each other where those of θ have other priors
        places = [rows for rows in places if prior.is_alike(rows)]
    found = Turn(places, density.read, gaussian.mean)
    turn = None if found.told.all() else found
    sums = DensitySums(density, max_grad_norm, turn)
    if not sums.is_valid(gaussian.mean if turn is None else turn.some(gaussian.mean)):
        raise ValueError(
            "the model cannot be evaluated at the median of its prior, where the run starts: use a"
            " prior that suits the likelihood."
        )
    coordinates = PyroCoordinates(density.prior)
    if is_diagonal:
        return _diagonal(sums, gaussian, coordinates, epsilon, delta, accountant, num_data, turn)
    prior_of_sums = gaussian if turn is None else turn.of_prior(gaussian).of(turn.told)
    return _general(
        sums, prior, prior_of_sums, coordinates, epsilon, delta, accountant, num_data, turn
    )


def _general(
    sums: GeneralSums,
    prior: LatentPrior,
    prior_of_sums: GaussianPrior,
    coordinates: Coordinates,
    epsilon: float | None,
    delta: float | None,
    accountant: PrivacyAccountant,
    num_data: int | None,
    turn: Turn | None,
) -> NoiseAwarePosterior:
    count = public_num_data(num_data, sums.num_records, accountant)
    plan = general_plan(
        total_multiplier(accountant, epsilon, delta),
        sums.dimension,
        count,
        accountant.neighboring,
        clips=sums.curvature_is_of_gradients,
        has_groups=sums.groups is not None,
    )
    held_before = little_left(accountant, epsilon, delta)
    charge(accountant, plan, _LABEL)
    surrogate, transcript = run_general(sums, plan, prior_of_sums, count)

    def agreement(mode: Tensor, precision: Tensor) -> float:
        if turn is not None:
            mode, precision = turn.some(mode), turn.some_of_matrix(precision)
        return surrogate.agreement(mode, precision)

    assumption = "the log likelihood is taken as quadratic around the last points of the run"
    if transcript.groups is None and 1 < sums.dimension <= LARGEST_DIMENSION:
        assumption += ", with a curvature that may change along the way there"
    statement = _statement(accountant, plan, sums, assumption)
    statement += _note_clipped(transcript, count, sums.gradient_bound, surrogate.gradient_std)
    if transcript.groups is not None:
        statement.append(
            f"  groups      every record reads the parameters of one of {len(transcript.groups)}"
            " groups, as made-up rows do"
        )
    if turn is not None:
        statement.append(turn.note())
        transcript = replace(transcript, turned=turn.places)
    return NoiseAwarePosterior(
        surrogate if turn is None else OfTold(surrogate, turn),
        prior,
        coordinates,
        statement,
        transcript=transcript,
        agreement=agreement,
        little_left=held_before,
    )


def _diagonal(
    sums: DiagonalSums,
    prior: GaussianPrior,
    coordinates: Coordinates,
    epsilon: float | None,
    delta: float | None,
    accountant: PrivacyAccountant,
    num_data: int | None,
    turn: Turn | None = None,
) -> NoiseAwarePosterior:
    count = public_num_data(num_data, sums.num_records, accountant)
    plan = diagonal_plan(
        total_multiplier(accountant, epsilon, delta),
        accountant.neighboring,
        clips=sums.curvature_is_of_gradients,
    )
    held_before = little_left(accountant, epsilon, delta)
    charge(accountant, plan, _LABEL)
    prior_of_phi = prior if turn is None else turn.of_alike(prior)
    prior_of_sums = prior if turn is None else prior_of_phi.of(turn.told)
    surrogate, transcript = run_diagonal(sums, plan, prior_of_sums, count)
    statement = _statement(
        accountant,
        plan,
        sums,
        "the log likelihood is taken as quadratic around the last points of the run, what its"
        " curvature has off the diagonal as noise of the size that the gradients show, and the"
        " prior as Gaussian",
        "diagonals of matrices",
    )
    statement += _note_clipped(transcript, count, sums.gradient_bound, surrogate.gradient_std)
    mixture: Mixture = surrogate
    if turn is not None:
        mixture = TurnedMixture(surrogate, prior_of_phi, turn)
        statement.append(turn.note())
        transcript = replace(transcript, turned=turn.places)
    return DiagonalPosterior(mixture, prior, coordinates, statement, transcript, held_before)


def _is_diagonal(curvature: str) -> bool:
    if curvature not in ("full", "diagonal"):
        raise ValueError(f"curvature must be 'full' or 'diagonal', got {curvature!r}.")
    return curvature == "diagonal"


def _require_prior_as_drawn(density: RecordDensity) -> None:
    """The diagonal form knows the prior by quantiles of draws alone."""
    for name in (*density.prior_factors, *density.prior.scaled):
        raise ValueError(
            f"site {name!r} changes the prior by a factor or a scale, and the diagonal form takes"
            ' the prior from draws, which do not know of it: use curvature="full", or write it'
            " into the latents' distributions."
        )


def _note_clipped(
    transcript: Transcript, num_data: int, bound: float, gradient_std: float
) -> list[str]:
    """What the run says of the gradients' bound, with a warning where what is cut off may move the
    mean by more than its standard deviation: half a percent may, of a hundred thousand records.
    """
    lines = []
    for release in transcript.clipped:
        share = min(max(release.value / max(num_data, 1), 0.0), 1.0)
        error = release.noise_std / max(num_data, 1)
        if error > _NO_ANSWER:
            lines.append("  clipped     noise hides how many gradients are")
            continue
        lines.append(f"  clipped     {share:.1%} of the gradients at the last point, ± {error:.1%}")
        surely = release.value - _SURELY * release.noise_std
        if _LOST * bound * surely > gradient_std:
            lines.append(
                "  CLIPPED     where that many are, the mean of the clipped gradients may not be"
                " zero at the true parameters: intervals may lie beside them"
            )
            warn(
                f"{share:.1%} of the gradients are clipped at the last point of the run: unless"
                " both sides lose alike, intervals lie beside the true parameters. Raise"
                " max_grad_norm, or scale the model so that records pull less.",
            )
    return lines


def _note_large(predictor_std: float) -> list[str]:
    """How curvatures fall off far out is a matter of the features' distribution, which is not
    released.
    """
    if predictor_std <= _LARGE_PREDICTORS:
        return []
    warn(
        f"linear predictors have a standard deviation of about {predictor_std:.2g}: nearly"
        " all targets are certain: intervals may be too narrow unless features are Gaussian. If"
        " records can be separated, a smaller prior_std holds the weights.",
    )
    return [
        f"  LARGE       linear predictors have a standard deviation of about {predictor_std:.2g}:"
        " how the curvature falls off so far out rests on the features being Gaussian"
    ]


def _statement(
    accountant: PrivacyAccountant,
    plan: Plan,
    sums: PrivateSums,
    assumption: str,
    kind: str = "matrices",
) -> list[str]:
    matrices = len(plan.curvature_multipliers) + len(plan.gram_multipliers)
    and_traces = " and its traces" if plan.level_multipliers else ""
    others = ", and a noisy histogram of lengths" if plan.length_multipliers else ""
    if plan.level_multipliers:
        others += ", their noisy traces over each site"
    if plan.clipped_multipliers:
        others += ", and a noisy number of clipped gradients"
    delta = 1e-5 if accountant.delta is None else accountant.delta
    return [
        (
            f"Noise-aware posterior from {len(plan.gradient_multipliers)} noisy gradients and"
            f" {matrices} noisy {kind}{others}"
        ),
        (
            "  charged     before the first release; the accountant now holds epsilon ="
            f" {accountant.get_epsilon(delta):.5g} at delta = {delta:g} ({accountant.neighboring})"
        ),
        (
            f"  proved      each record moves a gradient sum by at most {sums.gradient_bound:g}, a"
            f" curvature{and_traces} by at most {sums.curvature_bound:g}"
        ),
        *([] if sums.max_feature_norm is None else [shortened_rows(sums.max_feature_norm)]),
        f"  ASSUMED     for the width, not for privacy: {assumption}",
        (
            "  ASSUMED     for the width, not for privacy: the model is right, and few gradients"
            " are clipped"
        ),
    ]
