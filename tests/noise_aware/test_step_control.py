"""Steps of a private Newton run that have a longest length, against runs without one."""

import math
from functools import cache

import pytest
import torch
from scipy.stats import binom, norm

import torch_dpbayes as dpb
from torch_dpbayes.noise_aware import newton
from torch_dpbayes.noise_aware.modes import mode
from torch_dpbayes.noise_aware.planning import general_plan, total_multiplier
from torch_dpbayes.noise_aware.posterior import FlatCoordinates, NoiseAwarePosterior
from torch_dpbayes.noise_aware.priors import GaussianPrior
from torch_dpbayes.noise_aware.response import LinearResponse
from torch_dpbayes.noise_aware.step_control import StepControl
from torch_dpbayes.noise_aware.surrogate import Surrogate
from torch_dpbayes.noise_aware.transcript import GradientRelease

DOUBLE = torch.float64


class Undamped(StepControl):
    """Every step goes to the mode, and the next one starts there."""

    def note(self, release):
        self.best = release
        return release

    def next_point(self, surrogates):
        return mode(surrogates[0], self._prior)


def errors_of_the_precision(count, records=4000):
    """How far the mode of a log precision is from its value of maximum likelihood, in standard
    deviations of the records' posterior, ``[count]``. From above the true value a quadratic
    promises steps that are too long.
    """
    found, prior = [], flat_prior(1, 2.0)
    for _ in range(count):
        sums = Spread(torch.tensor([1.5], dtype=DOUBLE), records)
        plan = general_plan(multiplier(8.0), 1, records, "add_or_remove_one", clips=False)
        surrogate, _ = newton.run_general(sums, plan, prior, records)
        best = -float(sums.squares.mean().log())
        found.append((float(mode(surrogate, prior)) - best) / math.sqrt(2 / records))
    return found


def test_a_run_that_overshoots_arrives_where_steps_are_damped(monkeypatch):
    # noise adds a fifth of a standard deviation
    assert max(map(abs, errors_of_the_precision(12))) < 3
    monkeypatch.setattr(newton, "StepControl", Undamped)
    # one run in five comes to rest at the right place all the same
    assert max(map(abs, errors_of_the_precision(12))) > 3


@pytest.fixture
def prior():
    return GaussianPrior(torch.zeros(2, dtype=DOUBLE), torch.full((2,), 0.25, dtype=DOUBLE))


def release(theta, value, noise_std):
    return GradientRelease(
        torch.tensor(theta, dtype=DOUBLE), torch.tensor(value, dtype=DOUBLE), noise_std
    )


def surrogate_of(control, releases):
    response = LinearResponse(control.curvature, misfit=0.3)
    return Surrogate(releases, response, control.curvature, 0.0, control.best.theta)


def test_of_a_quadratic_steps_are_those_of_the_surrogate(prior):
    control = StepControl(prior)
    control.released(100 * torch.eye(2, dtype=DOUBLE))
    releases = [release([0.0, 0.0], [-100.0, 50.0], 1.0)]
    assert control.note(releases[0]) is releases[0]
    found = surrogate_of(control, releases)
    torch.testing.assert_close(control.next_point([found]), mode(found, prior))


def test_a_step_uphill_is_taken_back_and_shortened(prior):
    control = StepControl(prior)
    control.released(10 * torch.eye(2, dtype=DOUBLE))  # a tenth of what it should be
    first = control.note(release([0.0, 0.0], [-20.0, 0.0], 0.1))
    there = control.next_point([surrogate_of(control, [first])])
    assert float(there[0]) == pytest.approx(20 / 10.25, rel=1e-3)
    second = release(there.tolist(), [-20 + 100 * float(there[0]), 0.0], 0.1)
    assert control.note(second) is first
    # both gradients tell the curvature along the step
    torch.testing.assert_close(control.curvature[0, 0], torch.tensor(100.0, dtype=DOUBLE))
    back = control.next_point([surrogate_of(control, [first, second])])
    assert float(back[0]) == pytest.approx(20 / 100.25, rel=1e-2)


def test_the_longest_step_grows_where_steps_go_well(prior):
    control = StepControl(prior)
    control.released(1e-3 * torch.eye(2, dtype=DOUBLE))
    at, lengths = [0.0, 0.0], []
    for _ in range(4):
        found = control.note(release(at, [-1e4, -1e4], 1.0))
        there = control.next_point([surrogate_of(control, [found])])
        lengths.append(float((there - torch.tensor(at, dtype=DOUBLE)).norm()))
        at = there.tolist()
    first = 2 * math.sqrt(2)  # a standard deviation of the prior in each coordinate
    assert lengths == pytest.approx([first, 2 * first, 4 * first, 8 * first], rel=1e-6)


def test_under_noise_alone_next_to_no_step_is_taken_back(prior):
    """With a chance of 1.3e-3 each: of 400, 8 or more in one run of ten million."""
    taken_back = 0
    for _ in range(400):
        control = StepControl(prior)
        control.released(torch.eye(2, dtype=DOUBLE))
        points = torch.randn(2, 2, dtype=DOUBLE)
        values = 1000 * torch.randn(2, 2, dtype=DOUBLE)
        control.note(release(points[0].tolist(), values[0].tolist(), 1000.0))
        second = release(points[1].tolist(), values[1].tolist(), 1000.0)
        taken_back += control.note(second) is not second
    assert taken_back <= int(binom.isf(1e-6, 400, norm.sf(3)))


def test_releases_from_where_the_likelihood_has_another_shape_do_not_count(prior):
    control = StepControl(prior)
    control.released(100 * torch.eye(2, dtype=DOUBLE))
    near = release([0.1, 0.0], [10.0, 0.0], 5.0)
    far = release([3.0, 0.0], [900.0, 0.0], 5.0)
    best = control.note(release([0.0, 0.0], [0.0, 0.0], 5.0))
    assert control.agreeing([best, near, far], 0.0).tolist() == [True, True, False]


# -- calibration -----------------------------------------------------------------------------------


class Records:
    """Clipped gradients of −log p(record | θ), in closed form."""

    curvature_is_of_gradients = True

    def __init__(self, dimension, num_records, bound):
        self.dimension, self.num_records = dimension, num_records
        self.site, self.groups = torch.zeros(dimension, dtype=torch.int64), None
        self.gradient_bound, self.curvature_bound = bound, bound**2

    def gradients(self, theta):
        raise NotImplementedError

    def clipped(self, theta):
        found = self.gradients(theta)
        norms = found.norm(dim=1, keepdim=True).clamp_min(1e-30)
        return found * (self.gradient_bound / norms).clamp(max=1.0)

    def gradient_sum(self, theta):
        return self.clipped(theta).sum(0)

    def curvature_sum(self, theta):
        found = self.clipped(theta)
        return found.T @ found

    def is_valid(self, theta):
        return bool(theta.isfinite().all())


class Logistic(Records):
    def __init__(self, truth, count):
        super().__init__(len(truth), count, 1.0)
        x = torch.randn(count, len(truth), dtype=DOUBLE) / math.sqrt(len(truth))
        self._x = x / x.norm(dim=1, keepdim=True).clamp_min(1.0)
        self._y = torch.bernoulli((self._x @ truth).sigmoid())

    def gradients(self, theta):
        return ((self._x @ theta).sigmoid() - self._y)[:, None] * self._x


class Spread(Records):
    """Normal records of a known mean: θ is the log precision."""

    def __init__(self, truth, count):
        super().__init__(1, count, 8.0)
        self.squares = torch.randn(count, dtype=DOUBLE).square() * (-truth).exp()

    def gradients(self, theta):
        return 0.5 * (self.squares * theta.exp() - 1)[:, None]


class Groups(Records):
    """θ is a mean, a log scale and five groups' log odds; records tell the last alone."""

    def __init__(self, truth, count):
        super().__init__(len(truth), count, 1.0)
        self.site = torch.tensor([0, 1] + 5 * [2])
        self._group = torch.randint(2, len(truth), (count,))
        self._y = torch.bernoulli(truth[self._group].sigmoid())

    def gradients(self, theta):
        found = torch.zeros(len(self._y), len(theta), dtype=DOUBLE)
        found[torch.arange(len(self._y)), self._group] = theta[self._group].sigmoid() - self._y
        return found


class GroupsPrior:
    """mean ~ N(0, 1), log scale ~ N(−0.5, 0.4²), log odds ~ N(mean, scale²)."""

    frames = ()

    def sample(self):
        theta = torch.randn(7, dtype=DOUBLE)
        theta[1] = -0.5 + 0.4 * theta[1]
        theta[2:] = theta[0] + theta[1].exp() * theta[2:]
        return theta

    def log_density(self, theta):
        mean, log_scale, groups = theta[..., 0], theta[..., 1], theta[..., 2:]
        apart = (groups - mean[..., None]) / log_scale.exp()[..., None]
        top = mean.square() + ((log_scale + 0.5) / 0.4).square()
        return -0.5 * (top + apart.square().sum(-1)) - 5 * log_scale

    def gaussian(self):
        mean = torch.tensor([0.0, -0.5] + 5 * [0.0], dtype=DOUBLE)
        stds = torch.tensor([1.0, 0.4] + 5 * [1.3], dtype=DOUBLE)
        return GaussianPrior(mean, stds**-2)


def flat_prior(dimension, std):
    return GaussianPrior(
        torch.zeros(dimension, dtype=DOUBLE), torch.full((dimension,), std**-2, dtype=DOUBLE)
    )


def from_gaussian(prior):
    return prior.mean + prior.precision.rsqrt() * torch.randn(len(prior.mean), dtype=DOUBLE)


MODELS = {
    "logistic": (Logistic, flat_prior(3, 1.0)),
    "spread": (Spread, flat_prior(1, 2.0)),
    "groups": (Groups, GroupsPrior()),
}


def ranks(name, count, epsilon):
    """Where the true parameters lie in their posterior, 0 to 1, ``[d]``."""
    records, prior = MODELS[name]
    truth = prior.sample() if name == "groups" else from_gaussian(prior)
    sums = records(truth, count)
    plan = general_plan(
        multiplier(epsilon), sums.dimension, count, "add_or_remove_one", clips=False
    )
    surrogate, transcript = newton.run_general(sums, plan, prior.gaussian(), count)
    posterior = NoiseAwarePosterior(
        surrogate,
        prior,
        FlatCoordinates("theta"),
        [],
        transcript=transcript,
        agreement=surrogate.agreement,
    )
    draws = posterior.sample(1000)["theta"]
    return (draws < truth).double().mean(0)


@cache
def multiplier(epsilon):
    return total_multiplier(dpb.PrivacyAccountant(epsilon, 1e-5), None, None)


def coverage(name, count, epsilon, data_sets):
    """Of central 50 % and 90 % intervals: means over data sets, and their standard errors."""
    found = torch.stack([ranks(name, count, epsilon) for _ in range(data_sets)])
    shares = [((found - 0.5).abs() < level / 2).double().mean(1) for level in (0.5, 0.9)]
    return [(float(s.mean()), float(s.std()) / math.sqrt(data_sets)) for s in shares]


SIGNIFICANCE = 1e-6  # of a test
MISFIT = 0.03  # of the approximations
RECORDS = {"logistic": 2000, "spread": 20_000, "groups": 2000}
CELLS = [(name, epsilon) for name in MODELS for epsilon in (0.3, 1.0, 8.0) if name != "spread"]
CELLS += [("spread", 1.0), ("spread", 8.0)]


def covers(name, epsilon, data_sets, comparisons):
    threshold = norm.isf(SIGNIFICANCE / (2 * comparisons))
    found = coverage(name, RECORDS[name], epsilon, data_sets)
    good = []
    for level, (share, error) in zip((0.5, 0.9), found):
        # of few data sets the error may look smaller than it is
        error = max(error, math.sqrt(level * (1 - level) / (4 * data_sets)))
        good.append(abs(share - level) < MISFIT + threshold * error)
    return all(good)


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_damped_runs_have_intervals_that_cover(name):
    assert covers(name, 1.0, 40, 2)


@pytest.mark.thorough
def test_runs_that_swing_have_not(monkeypatch):
    monkeypatch.setattr(newton, "StepControl", Undamped)
    assert not covers("spread", 1.0, 300, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name, epsilon", CELLS)
def test_damped_runs_have_intervals_that_cover_what_they_say(name, epsilon):
    assert covers(name, epsilon, 400, 2 * len(CELLS))
