"""Curvatures and likelihoods of groups' parameters, against dense matrices."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import binom, norm

from torch_dpbayes.mcmc.density import RecordDensity
from torch_dpbayes.noise_aware import laplace, newton
from torch_dpbayes.noise_aware.block_levels import BlockLevels
from torch_dpbayes.noise_aware.grouped_surrogate import GroupedForm, GroupedSurrogate
from torch_dpbayes.noise_aware.groups import GroupLevels, Groups
from torch_dpbayes.noise_aware.records import DensitySums
from torch_dpbayes.noise_aware.response import LinearResponse, OuterProductResponse
from torch_dpbayes.noise_aware.surrogate import AnySurrogate
from torch_dpbayes.noise_aware.transcript import CurvatureRelease, GradientRelease
from torch_dpbayes.noise_aware.turned import Turn
from torch_dpbayes.noise_aware.uncertain_level import UncertainLevel

DOUBLE = torch.float64
COUNT, OWN, REST = 5, 2, 3
SIZE = COUNT * OWN + REST
# in any order among the coordinates
PLACES = torch.randperm(SIZE)[: COUNT * OWN].reshape(COUNT, OWN)
GROUPS = Groups(PLACES, SIZE)
SITE = torch.ones(SIZE, dtype=torch.int64)
SITE[PLACES] = 0


def outer_products(count, size=SIZE, places=PLACES):
    """A sum over records that read one group each."""
    records = torch.randn(count, size, dtype=DOUBLE)
    of_group = torch.zeros(len(places), size, dtype=DOUBLE)
    of_group[:, [k for k in range(size) if k not in places]] = 1.0
    of_group[torch.arange(len(places))[:, None], places] = 1.0
    records *= of_group[torch.randint(len(places), (count,))]
    return records.T @ records


def noise(std, size=SIZE):
    found = std * torch.randn(size, size, dtype=DOUBLE)
    return (found + found.T) / 2


@pytest.mark.parametrize("own, rest", [(1, 2), (2, 3), (3, 0), (1, 0), (4, 1)])
def test_the_misfit_is_that_of_the_whole_matrix(own, rest):
    size = 4 * own + rest
    places = torch.randperm(size)[: 4 * own].reshape(4, own)
    groups = Groups(places, size)
    matrix = outer_products(60, size, places) + torch.eye(size, dtype=DOUBLE)
    residual = torch.randn(7, size, dtype=DOUBLE)
    ordered = residual[:, groups.order].requires_grad_()
    blocks = groups.blocks(matrix.expand(7, size, size))
    none = torch.zeros(7, own, 4, 1, dtype=DOUBLE)
    misfit = blocks.misfit(*groups.parts(ordered), GroupLevels(none, none, none[..., 0]))
    solved = torch.linalg.solve(matrix, residual.T).T
    torch.testing.assert_close(misfit, (residual * solved).sum(1) + torch.logdet(matrix))
    (slope,) = torch.autograd.grad(misfit.sum(), ordered)
    torch.testing.assert_close(slope, 2 * solved[:, groups.order])


def test_a_positive_matrix_is_left_as_it_is_but_for_what_lies_between_groups():
    matrix = outer_products(200) + 3 * torch.eye(SIZE, dtype=DOUBLE)
    between = GROUPS.apart * noise(1.0)
    torch.testing.assert_close(GROUPS.floored(matrix + between, 1.0), matrix)


def test_another_one_is_made_positive():
    for _ in range(20):
        found = GROUPS.floored(noise(5.0), 0.5)
        assert float(torch.linalg.eigvalsh(found)[0]) > 0.01
        assert not found[GROUPS.apart].any()
        torch.testing.assert_close(found, found.T)
        # what groups and the rest have in common is lessened and not left out
        assert bool(found[PLACES.flatten()][:, GROUPS.rest].any())


def test_noise_contradicts_no_groups_and_records_that_read_two_do():
    """Of a thousand releases one in a million is allowed: none, or one in a thousand runs."""
    std = 4.0
    exact = 100 * torch.eye(SIZE, dtype=DOUBLE)
    told = [GROUPS.contradict(CurvatureRelease(None, exact + noise(std), std)) for _ in range(1000)]
    assert sum(told) <= binom.isf(1e-6, 1000, 1e-6)
    two = PLACES[0, 0], PLACES[1, 0]
    exact[two], exact[two[::-1]] = 60.0, 60.0
    assert GROUPS.contradict(CurvatureRelease(None, exact + noise(std), std))
    assert not GROUPS.contradict(CurvatureRelease(None, torch.eye(SIZE, dtype=DOUBLE), 0.0))


def test_noise_between_groups_does_not_get_into_a_curvature():
    blocks, std = BlockLevels(SITE, 1000, GROUPS), 30.0
    exact = outer_products(200)
    one, two = exact + noise(std), exact + noise(std)
    own = blocks.errors(std)
    raw, errors = blocks.combined(one, own, two, own)
    found, left = blocks.denoised(raw, errors)
    assert not found[GROUPS.apart].any()
    at = blocks.at(found, torch.tensor([20.0, 200.0], dtype=DOUBLE))
    torch.testing.assert_close(blocks.means(at), torch.tensor([20.0, 200.0], dtype=DOUBLE))
    assert not at[GROUPS.apart].any() and float(torch.linalg.eigvalsh(at)[0]) > 0
    assert left < BlockLevels(SITE, 1000).denoised(raw, BlockLevels(SITE, 1000).errors(std))[1]


def test_variances_are_those_of_the_error_that_is_made():
    """In the mean over 300 releases of matrices whose entries have that law, for each kind."""
    std, kinds = 20.0, (GROUPS.apart, torch.eye(SIZE, dtype=torch.bool))
    blocks, level = BlockLevels(SITE, 1000, GROUPS), torch.full((2,), 100.0, dtype=DOUBLE)
    made = stated = torch.zeros(SIZE, SIZE, dtype=DOUBLE)
    for _ in range(300):
        exact = torch.where(GROUPS.apart, 0.0, 100 * torch.eye(SIZE, dtype=DOUBLE) + noise(15.0))
        raw = exact + noise(std)
        found, _ = blocks.denoised(raw, blocks.errors(std))
        made = made + (found - exact).square()
        stated = stated + blocks.error_variances(raw, blocks.errors(std), level)
    others = ~(kinds[0] | kinds[1])
    assert not stated[kinds[0]].any() and not made[kinds[0]].any()
    for kind in (kinds[1], others):
        assert 0.6 < float((made[kind].sum() / stated[kind].sum()).sqrt()) < 1.15


def test_an_error_is_no_larger_than_the_levels():
    blocks, low = BlockLevels(SITE, 1000, GROUPS), torch.tensor([0.3, 2.0], dtype=DOUBLE)
    found = blocks.error_variances(noise(1e3), blocks.errors(1e3), low)
    bound = torch.outer(low[SITE], low[SITE])
    assert bool((found <= bound * (1 + 1e-9)).all()) and bool((found > 0.01 * bound).any())


def gradients(curvature):
    thetas = torch.randn(4, SIZE, dtype=DOUBLE)
    values = thetas @ curvature + torch.randn(4, SIZE, dtype=DOUBLE)
    return [GradientRelease(*each, 1.0 + k) for k, each in enumerate(zip(thetas, values))]


def surrogate(kind, curvature):
    centre, variances = torch.randn(SIZE, dtype=DOUBLE), (GROUPS.floored(noise(2.0), 0.5)).square()
    response = {
        "linear": LinearResponse(curvature),
        "outer": OuterProductResponse(curvature, centre, 50),
    }[kind]
    counted = torch.tensor([True, False, True, True])
    levels = curvature.diagonal()[None]  # these are sure
    return GroupedSurrogate(
        gradients(curvature), response, curvature, variances, levels, centre, counted, GROUPS
    )


@pytest.mark.parametrize("kind", ["linear", "outer"])
def test_the_blocks_have_the_density_of_the_whole(kind):
    """And so have several of them at once, where groups' own curvatures are sure."""
    some = [surrogate(kind, outer_products(30) + torch.eye(SIZE, dtype=DOUBLE)) for _ in range(3)]
    for each in some:
        each._variances[PLACES, PLACES] = 0.0
    theta = 2 * torch.randn(6, SIZE, dtype=DOUBLE)
    dense = torch.stack([AnySurrogate.log_likelihood(each, theta) for each in some])
    torch.testing.assert_close(torch.stack([s.log_likelihood(theta) for s in some]), dense)
    together = GroupedForm.stacked([s.form() for s in some]).log_likelihood(theta)
    torch.testing.assert_close(together, dense)


def test_the_covariance_is_that_of_independent_errors():
    """Of 20,000 errors; every entry within six standard errors of a product of normal numbers."""
    count, found = 20_000, surrogate("linear", torch.eye(SIZE, dtype=DOUBLE))
    variances = found._variances
    moved = torch.randn(SIZE, dtype=DOUBLE)
    errors = variances.sqrt() * torch.randn(count, SIZE, SIZE, dtype=DOUBLE)
    errors = errors.tril() + errors.tril(-1).mT
    apart = errors @ (found._point - moved)
    products = apart[:, :, None] * apart[:, None, :]
    stated = found._of_curvature_error(moved)
    error = 6 * products.std(0) / math.sqrt(count)
    assert bool(((products.mean(0) - stated).abs() <= error + 1e-12).all())


def likely(mean, std, count):
    """Equally likely positive numbers of a normal law."""
    negative = norm.cdf(0, mean, std)
    shares = negative + (1 - negative) * (torch.arange(count) + 0.5).double().numpy() / count
    return torch.from_numpy(norm.ppf(shares, mean, std))[:, None]


def of_one_group_each(std, curvature=95.0, rest=1, count=5):
    """Three groups of one parameter, and the rest; the last release is at 0."""
    size = 3 + rest
    groups = Groups(torch.arange(3)[:, None], size)
    exact = curvature * torch.eye(size, dtype=DOUBLE)
    exact[:3, 3:] = exact[3:, :3] = 10.0
    error = torch.full((size, size), 4.0, dtype=DOUBLE)
    error[range(size), range(size)] = std**2
    error[groups.apart] = 0.0
    last = GradientRelease(torch.zeros(size, dtype=DOUBLE), torch.randn(size, dtype=DOUBLE), 6.0)
    every = torch.ones(1, dtype=torch.bool)
    levels = likely(curvature, std, count).expand(-1, size)
    response = LinearResponse(exact)
    return GroupedSurrogate([last], response, exact, error, levels, last.theta, every, groups)


def test_a_groups_own_curvature_is_integrated_out():
    """The mean over many levels against quadrature over their law."""
    mean, std = 10.0, 8.0
    found = of_one_group_each(std, mean, rest=0, count=4000)
    theta = torch.tensor([[0.5, -1.0, 3.0]], dtype=DOUBLE)
    expected = 0.0
    for at, gradient in zip(theta[0].tolist(), found._mean.tolist(), strict=True):

        def density(level, at=at, gradient=gradient):
            law = norm.pdf(level, mean, std) / norm.sf(0, mean, std)
            return law * norm.pdf(gradient + level * at, 0, math.sqrt(level + 36.0))

        expected += math.log(quad(density, 0, mean + 12 * std, epsrel=1e-9)[0])
    expected += 1.5 * math.log(2 * math.pi)
    assert float(found.log_likelihood(theta)) == pytest.approx(expected, abs=0.01)


def test_the_rest_is_given_what_groups_have():
    """The product of each group's mean density and of the rest's, from whole matrices."""
    found = of_one_group_each(8.0, rest=2)
    theta = torch.randn(1, 5, dtype=DOUBLE)
    residual = found._mean + theta[0] @ found.curvature
    sure = found.curvature + found.noise
    error = found._of_curvature_error(theta[0])
    law = torch.distributions.MultivariateNormal(torch.zeros(5, dtype=DOUBLE), sure + error)
    expected = float(law.log_prob(residual))
    levels = likely(95.0, 8.0, 5)[:, 0]
    for g in range(3):
        variance = float((sure + error)[g, g])
        expected -= norm.logpdf(float(residual[g]), 0, math.sqrt(variance))
        change = levels - found.curvature[g, g]
        own = variance - 64.0 * float(theta[0, g]) ** 2 + change
        at = residual[g] + change * theta[0, g]
        expected += math.log(float(norm.pdf(at, 0, own.sqrt()).mean()))
    expected += 2.5 * math.log(2 * math.pi)
    assert float(found.log_likelihood(theta)) == pytest.approx(expected, abs=1e-9)


def test_far_away_hardly_any_curvature_is_no_explanation():
    """A Gaussian error of a quarter of the curvature has a plateau there, of .001 of the maximum;
    under a wide prior chains stayed on it.
    """
    found = of_one_group_each(25.0)
    theta = torch.zeros(2, 4, dtype=DOUBLE)
    theta[1, 0] = 3.0
    near, far = found.log_likelihood(theta)
    assert float(near - far) > 30
    near, far = AnySurrogate.log_likelihood(found, theta)
    assert float(near - far) < 15


def test_a_level_leaves_no_less_than_the_noise():
    """A group's second parameter, given the first, has less curvature than any level of its own
    says.
    """
    block = torch.full((2, 2), 9.9, dtype=DOUBLE) + 0.1 * torch.eye(2, dtype=DOUBLE)
    curvature = torch.block_diag(block, block)
    groups = Groups(torch.arange(4).reshape(2, 2), 4)
    last = GradientRelease(torch.zeros(4, dtype=DOUBLE), torch.zeros(4, dtype=DOUBLE), 0.1)
    every = torch.ones(1, dtype=torch.bool)
    variances = 100 * torch.eye(4, dtype=DOUBLE)
    response = LinearResponse(curvature)
    own = likely(10.0, 10.0, 5).expand(-1, 4)
    found = GroupedSurrogate([last], response, curvature, variances, own, last.theta, every, groups)
    assert bool(found.log_likelihood(torch.randn(9, 4, dtype=DOUBLE)).isfinite().all())


def levels_of(exact, std, count=101, most=1e9):
    """Of groups' own curvatures ``exact``, in ten releases, ``[10, count, groups]``."""
    size = len(exact)
    groups = Groups(torch.arange(size)[:, None], size)
    blocks = BlockLevels(torch.zeros(size, dtype=torch.int64), 1000, groups)
    found = []
    for _ in range(10):
        raw = torch.diag(exact) + noise(std, size)
        level = blocks.means(raw).clamp_min(1.0)
        found.append(blocks.own_levels(raw, blocks.errors(std), level, most, count))
    return torch.stack(found)


def test_levels_are_near_what_was_released_where_that_is_sure():
    """Within six standard deviations of the noise, and as uncertain as that."""
    exact = torch.linspace(200.0, 900.0, 20, dtype=DOUBLE)
    found = levels_of(exact, 5.0)
    assert bool(((found.median(1).values - exact).abs() < 30).all())
    assert float(found.std(1).mean()) == pytest.approx(5.0, rel=0.1)


def test_levels_are_near_their_sites_where_noise_hides_single_ones():
    """And positive. The level of each release errs by 40/√20; six standard errors are allowed."""
    found = levels_of(torch.full((20,), 60.0, dtype=DOUBLE), 40.0)
    assert float(found.mean()) == pytest.approx(60.0, abs=6 * 40 / math.sqrt(20 * 10))
    assert bool((found > 0).all()) and float(found.std(1).mean()) < 40


def test_no_level_is_above_what_the_records_can_have():
    """Where noise hides that, too, and where what was found lies above it."""
    for exact, std in ((10.0, 1e5), (10.0, 100.0), (190.0, 5.0), (260.0, 5.0)):
        found = levels_of(torch.full((20,), exact, dtype=DOUBLE), std, most=200.0)
        assert bool((found > 0).all()) and bool((found <= 200 * (1 + 1e-9)).all())


def test_groups_without_records_have_hardly_any_curvature():
    """A law as wide as the others are apart would have two or three times the noise."""
    exact = torch.full((20,), 1000.0, dtype=DOUBLE)
    exact[:3] = 0.0
    found = levels_of(exact, 8.0)
    assert float(found[:, :, :3].median()) < 0.5 * 8


def test_levels_without_noise_are_what_was_released():
    exact = torch.linspace(1.0, 9.0, 20, dtype=DOUBLE)
    torch.testing.assert_close(levels_of(exact, 0.0, 3).mean((0, 1)), exact)


# --- runs -----------------------------------------------------------------------------------------


def varying(groups, also=None):
    """Effects of groups; one of the groups can have that of another, too."""

    def model(group, y=None):
        scale = pyro.sample("scale", dist.HalfNormal(torch.ones((), dtype=DOUBLE)))
        with pyro.plate("groups", groups):
            effect = pyro.sample("effect", dist.Normal(0 * scale, scale))
        logits = effect[group]
        if also is not None:
            logits = logits + (group == also[0]) * effect[also[1]]
        with pyro.plate("data", len(group)):
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    return model


def simulated(groups, size):
    group = torch.randint(groups, (size,))
    return group, torch.bernoulli(torch.randn(groups, dtype=DOUBLE)[group].sigmoid())


def run(model, *data):
    return laplace(model, *data, epsilon=8.0, delta=1e-5, max_grad_norm=1.0)


def test_a_run_uses_what_groups_cannot_have_in_common():
    post = run(varying(12), *simulated(12, 2000))
    form = post._likelihood._inner
    parts = form._parts if isinstance(form, UncertainLevel) else [form]
    assert all(isinstance(part, GroupedSurrogate) for part in parts)
    off = ~torch.eye(12, dtype=torch.bool)
    assert not any(part.curvature[off].any() for part in parts)
    assert post.transcript.groups.tolist() == [[k] for k in range(12)]
    assert "every record reads the parameters of one of 12 groups" in post.guarantee()


def test_what_made_up_rows_did_not_show_is_seen_in_the_releases():
    """Records of the eleventh group read the twelfth's effect, too."""
    group, y = simulated(12, 4000)
    group[:2000] = 10
    post = run(varying(12, also=(10, 11)), group, y)
    assert post.transcript.groups is None and "groups" not in post.guarantee()


def test_groups_that_the_rest_makes_up_for_in_the_data_are_not_used():
    """All records have the same covariate, which is then no more than an intercept; made-up rows
    have others.
    """

    def model(group, x, y=None):
        effect = pyro.sample("effect", dist.Normal(torch.zeros(8, dtype=DOUBLE), 1.0).to_event(1))
        slope = pyro.sample("slope", dist.Normal(0 * effect[0], 1.0))
        with pyro.plate("data", len(group)):
            pyro.sample("y", dist.Bernoulli(logits=effect[group] + slope * x), obs=y)

    group, y = simulated(8, 20_000)
    for x, are in (
        (torch.ones(20_000, dtype=DOUBLE), False),
        (torch.randn(20_000, dtype=DOUBLE), True),
    ):
        assert (run(model, group, x, y).transcript.groups is not None) is are


def test_groups_are_those_of_the_coordinates_that_records_tell():
    """Weights of three classes in each group: two contrasts are told."""

    def model(group, y):
        weights = pyro.sample("weights", dist.Normal(torch.zeros(6, 3), 1.0).to_event(2))
        with pyro.plate("data", len(group)):
            pyro.sample("y", dist.Categorical(logits=weights[group]), obs=y)

    density = RecordDensity(model, (torch.randint(6, (20,)), torch.randint(3, (20,))))
    turn = Turn(density.zero_sums(), density.read, torch.zeros(18, dtype=DOUBLE))
    sums = DensitySums(density, 1.0, turn)
    places = sums.groups.places
    assert sorted(places.flatten().tolist()) == list(range(12)) and places.shape == (6, 2)
    rows = torch.zeros(1, 18, dtype=DOUBLE)
    rows[0, 9:12] = torch.tensor([0.2, 0.3, -0.5])
    told = turn.some(rows)[0]
    assert sorted(told.nonzero().flatten().tolist()) == sorted(places[3].tolist())


def test_the_diagonal_form_does_not_look_for_groups(monkeypatch):
    """Gradients of made-up rows, all at once, are too many numbers there."""

    def fail(self):
        raise AssertionError("it was asked for groups")

    monkeypatch.setattr(RecordDensity, "groups", fail)
    group, y = simulated(12, 500)
    post = laplace(
        varying(12), group, y, epsilon=8.0, delta=1e-5, max_grad_norm=1.0, curvature="diagonal"
    )
    assert post.transcript.groups is None


def test_a_turn_that_mixes_groups_leaves_none():
    turn = Turn([torch.arange(6)[:, None]], torch.ones(8).bool(), torch.zeros(8, dtype=DOUBLE))
    assert not turn.told_of_groups(torch.arange(6)[:, None]).numel()
    assert Groups.of(turn.told_of_groups(torch.arange(6)[:, None]), 7) is None


@pytest.mark.parametrize("own, rest, are", [(8, 32, True), (9, 2, False), (2, 33, False)])
def test_large_groups_and_a_large_rest_are_left_alone(own, rest, are):
    found = Groups.of(torch.arange(3 * own).reshape(3, own), 3 * own + rest)
    assert (found is not None) is are


def test_a_sure_level_is_one_likelihood(monkeypatch):
    monkeypatch.setattr(newton, "_SURE_LEVEL", 1e9)
    inner = run(varying(12), *simulated(12, 2000))._likelihood._inner
    assert isinstance(inner, GroupedSurrogate)
