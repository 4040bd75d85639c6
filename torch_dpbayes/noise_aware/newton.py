"""The private run: noisy gradients and curvatures at points that Newton-like steps on the
surrogate choose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from .bent_response import bent_surrogates
from .block_levels import BlockLevels
from .feature_lengths import EDGES, best_length
from .feature_shape import InShape, feature_shape
from .grouped_surrogate import GroupedSurrogate
from .hidden_directions import with_hidden_levels
from .learned_curvature import LARGEST_DIMENSION, LearnedCurvatureSurrogate
from .learned_way import learned_ways
from .measured_curvature import MeasuredCurvature
from .mechanism import GeneralSums, Mechanism, PrivateGram
from .modes import mode
from .planning import Plan
from .priors import GaussianPrior
from .response import (
    MISFIT,
    LinearResponse,
    OuterProductResponse,
    Response,
    at_level,
    combined,
    denoised,
    levels,
    shape_kept,
)
from .saturation import share_of_curvature
from .step_control import StepControl
from .surrogate import AnySurrogate, Surrogate, positive
from .transcript import CurvatureRelease, Transcript
from .uncertain_level import UncertainLevel

# of the level of a curvature; above it the level's distribution counts and not its deviation alone
_HARMLESS_NOISE = 0.1
_SURE_LEVEL = 0.02  # where their distribution is in any case no more than a few evaluations
_LEVELS = 11
_LEVELS_OF_GROUPS, _OWN_LEVELS = 5, 7  # of all groups, and of each besides


def run_glm(
    sums: PrivateGram, plan: Plan, num_data: int
) -> tuple[AnySurrogate | UncertainLevel | InShape, Transcript]:
    """A run for a model with one linear predictor a record.

    Args:
        sums: the records, and the prior, which holds the run where the noise is large.
        plan: the noise, charged already.
        num_data: number of records, a public constant.
    """
    mechanism = Mechanism(sums)
    first = mechanism.gram(sums, plan.gram_multipliers[0])
    features, features_std = denoised(first.value, first.noise_std)
    response = sums.response(features, num_data)
    found = feature_shape(
        features,
        features_std,
        response.slope(sums.prior.mean),
        sums.prior,
        sums.gradient_bound / math.sqrt(sum(z**-2 for z in plan.gradient_multipliers)),
        num_data,
        math.sqrt(sums.gram_bound),
    )
    lengths = mechanism.length_counts(sums, found.matrix, EDGES, plan.length_multipliers[0])
    typical = sums.slope(min(math.sqrt(float(features.trace()) / num_data / sums.gram_bound), 1.0))
    length = best_length(lengths, num_data, found, lambda length: sums.slope(length) / typical)
    shape = None if length is None else math.sqrt(length) * found.matrix
    transcript = Transcript(grams=[first], lengths=[lengths], feature_map=shape)
    if shape is not None:
        shaped = sums.in_shape(shape)
        transcript.grams.append(Mechanism(shaped).gram(shaped, plan.gram_multipliers[1]))
        surrogate = _run_glm(shaped, plan, transcript, transcript.grams[1], num_data)
        return InShape(surrogate, shape), transcript
    second = mechanism.gram(sums, plan.gram_multipliers[1])
    transcript.grams.append(second)
    both = CurvatureRelease(None, (first.value + second.value) / 2, first.noise_std / math.sqrt(2))
    return _run_glm(sums, plan, transcript, both, num_data), transcript


def _run_glm(
    sums: PrivateGram,
    plan: Plan,
    transcript: Transcript,
    gram: CurvatureRelease,
    num_data: int,
) -> AnySurrogate | UncertainLevel:
    mechanism, prior = Mechanism(sums), sums.prior
    features, features_std = denoised(gram.value, gram.noise_std)
    response = sums.response(features, num_data)
    relative = features_std / float(features.trace())
    kind: type[AnySurrogate] = Surrogate
    if prior.dimension <= LARGEST_DIMENSION:
        kind = LearnedCurvatureSurrogate
    theta = prior.mean
    for multiplier in plan.gradient_multipliers:
        transcript.gradients.append(mechanism.gradient(theta, multiplier))
        centre = theta
        slope = response.slope(centre)
        spread = relative * float(slope.trace())
        theta = mode(kind(transcript.gradients, response, slope, spread, centre), prior)
    curvature = slope
    for multiplier in plan.curvature_multipliers:
        release = mechanism.curvature(centre, multiplier)
        transcript.curvatures.append(release)
        curvature, spread = combined(slope, spread, release.value, release.noise_std)
        curvature = positive(curvature, spread)
    surrogate = kind(transcript.gradients, response, curvature, spread, centre)
    if transcript.curvatures or _is_level_known(gram.value, gram.noise_std):
        return surrogate
    # below the prior's precision the records say nothing, and more than this they cannot say
    least = float(prior.precision.mean()) * sums.gram_bound / sums.curvature_bound
    most = num_data * sums.gram_bound / prior.dimension
    spread = gram.noise_std * math.sqrt(shape_kept(gram.value, gram.noise_std))
    parts: list[AnySurrogate] = []
    for level in map(float, levels(gram.value, gram.noise_std, least, most, _LEVELS)):
        response = sums.response(at_level(features, level), num_data)
        slope = response.slope(centre)
        # without negative eigenvalues no shape is larger than the level
        relative = min(spread, level) / (level * prior.dimension)
        std = relative * float(slope.trace())
        parts.append(kind(transcript.gradients, response, slope, std, centre))
    return UncertainLevel(parts, surrogate)


def run_general(
    sums: GeneralSums, plan: Plan, prior: GaussianPrior, num_data: int
) -> tuple[AnySurrogate | UncertainLevel | InShape, Transcript]:
    """A run for any model: its log likelihood is taken as quadratic around the last points.

    Args:
        sums: the records.
        plan: the noise, charged already.
        prior: a Gaussian one, or what a Gaussian says of another one; the steps alone use it.
        num_data: number of records, a public constant.
    """
    mechanism, control, groups = Mechanism(sums), StepControl(prior), sums.groups
    blocks = BlockLevels(sums.site, num_data, groups)
    transcript = Transcript()
    multipliers = dict(zip(plan.curvature_steps, plan.curvature_multipliers, strict=True))
    has_levels = bool(plan.level_multipliers)
    of_levels = dict(zip(plan.curvature_steps, plan.level_multipliers, strict=has_levels))
    theta, holds_mean = prior.mean, False
    estimates: list[MeasuredCurvature] = []

    def response(at: Tensor, place: Tensor, misfit: float = 0.0) -> Response:
        if holds_mean:
            return OuterProductResponse(at, place, num_data, misfit)
        return LinearResponse(at, misfit=misfit)

    def learned(at: Tensor, spread: float, most: float | None = None) -> Sequence[AnySurrogate]:
        if holds_mean or groups is not None:
            return []
        std = blocks.root_mean(errors.entries)
        gradients = transcript.gradients
        known = gradients, at, spread, raw, std, centre, prior, most
        return bent_surrogates(*known) or learned_ways(*known)

    def fitted(spread: float) -> Surrogate:
        at, gradients = control.curvature, transcript.gradients
        counted = control.agreeing(gradients, spread)
        return Surrogate(gradients, response(at, centre, MISFIT), at, spread, centre, counted)

    for step, multiplier in enumerate(plan.gradient_multipliers):
        transcript.gradients.append(mechanism.gradient(theta, multiplier))
        best = control.note(transcript.gradients[-1])
        centre = best.theta
        if step in multipliers:
            held_mean = holds_mean
            if step in of_levels:
                release, traces = mechanism.curvature_with_levels(
                    sums, centre, multipliers[step], of_levels[step]
                )
                transcript.levels.append(traces)
            else:
                release, traces = mechanism.curvature(centre, multipliers[step]), None
            transcript.curvatures.append(release)
            if sums.curvature_is_of_gradients:
                measured = MeasuredCurvature.about_the_mean(release, traces, best, num_data, blocks)
                share = share_of_curvature(release, num_data * sums.curvature_bound)
            else:
                measured, share = MeasuredCurvature(release.value, release.noise_std), 1.0
            holds_mean = measured.holds_mean
            if held_mean and not holds_mean:
                # an average would keep the part of the mean that earlier ones have
                estimates.clear()
            if groups is not None and groups.contradict(release):
                groups, blocks = None, BlockLevels(sums.site, num_data)
            estimates.append(measured)
            raw, errors = blocks.average([one.on(blocks) for one in estimates])
            curvature, spread = blocks.denoised(raw, errors)
            control.released(share * curvature)
        theta = control.next_point([fitted(spread), *learned(control.curvature, spread)[:1]])
        # the point before it is valid, and all between them are public or released
        while not sums.is_valid(theta):
            theta = (theta + centre) / 2
    for multiplier in plan.clipped_multipliers:
        transcript.clipped.append(mechanism.clipped_count(sums, centre, multiplier))
    if groups is not None and not groups.are_told_apart(curvature):
        groups, blocks = None, BlockLevels(sums.site, num_data)
        raw, errors = blocks.average([one.on(blocks) for one in estimates])
        curvature, _ = blocks.denoised(raw, errors)
    control.released(curvature)
    spread = blocks.left(raw, errors)
    surrogate = fitted(spread)
    counted = control.agreeing(transcript.gradients, spread)
    # the bounds as for a generalised linear model
    least, most = float(prior.precision.mean()), num_data * sums.curvature_bound
    gradients = transcript.gradients

    def likelihood(at: Tensor, levels: Tensor, misfit: float = 0.0) -> Surrogate:
        of_gradients = response(at, centre, misfit)
        if groups is None:
            units = blocks.shape_scales(levels, spread)
            return Surrogate(gradients, of_gradients, at, spread, centre, counted, units)
        left = blocks.error_variances(raw, errors, levels)
        own = blocks.own_levels(raw, errors, levels, most, _OWN_LEVELS)
        return GroupedSurrogate(gradients, of_gradients, at, left, own, centre, counted, groups)

    if of_way := learned(curvature, spread, most):
        return UncertainLevel(of_way, of_way[0]), transcript
    if groups is not None:
        surrogate = likelihood(curvature, blocks.means(curvature), MISFIT)
        transcript = replace(transcript, groups=groups.places)
    elif blocks.are_known(raw, errors, _HARMLESS_NOISE):
        std = blocks.root_mean(errors.entries)
        found = with_hidden_levels(gradients, response, raw, std, centre, counted, least, most)
        if found is not None:
            return found, transcript
    if blocks.are_known(raw, errors, _SURE_LEVEL):
        return surrogate, transcript
    count = _LEVELS if groups is None else _LEVELS_OF_GROUPS
    likely = blocks.likely(raw, errors, least, most, count)
    parts = [likelihood(blocks.at(curvature, levels), levels) for levels in likely]
    return UncertainLevel(parts, surrogate), transcript


def _is_level_known(released: Tensor, noise_std: float) -> bool:
    """Whether the mean eigenvalue of a noisy matrix is far above its noise."""
    noise = noise_std / math.sqrt(len(released))
    return noise < _HARMLESS_NOISE * float(released.trace()) / len(released)
