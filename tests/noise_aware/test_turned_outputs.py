"""A module's parameters in coordinates in which its loss does not couple outputs."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_dpbayes.mcmc.density import RecordDensity
from torch_dpbayes.noise_aware import laplace_for_module
from torch_dpbayes.noise_aware.coupled_outputs import coupled_outputs
from torch_dpbayes.noise_aware.records import DensitySums
from torch_dpbayes.noise_aware.turned_outputs import turn_of_layer
from torch_dpbayes.ops.pyro_model import model_of_module

DOUBLE = torch.float64
LOSS = partial(functional.cross_entropy, reduction="none")
FEATURES, HIDDEN, CLASSES, RECORDS, BOUND = 2, 3, 4, 30, 0.5


def network():
    layers = nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)
    return nn.Sequential(*layers).double()


def turned():
    net = network()
    x = torch.randn(RECORDS, FEATURES, dtype=DOUBLE)
    labels = torch.randint(CLASSES, (RECORDS,))
    density = RecordDensity(model_of_module(net, LOSS, 1.0), (x, labels), count_is_public=True)
    turn = turn_of_layer(density.prior, coupled_outputs(net, LOSS, x, labels))
    return density, turn, x, labels


def matrix_of(turn, size):
    """T of φ = Tθ."""
    return turn.of(torch.eye(size, dtype=DOUBLE)).T


def test_a_turn_is_orthogonal_and_leaves_other_layers():
    density, turn, *_ = turned()
    size = density.prior.dimension
    matrix, eye = matrix_of(turn, size), torch.eye(size, dtype=DOUBLE)
    torch.testing.assert_close(matrix @ matrix.T, eye)
    theta = torch.randn(5, size, dtype=DOUBLE)
    torch.testing.assert_close(turn.of(theta), theta @ matrix.T)
    torch.testing.assert_close(turn.back(turn.of(theta)), theta)
    symmetric = theta.T @ theta
    torch.testing.assert_close(turn.of_matrix(symmetric), matrix @ symmetric @ matrix.T)
    torch.testing.assert_close(turn.back_of_matrix(turn.of_matrix(symmetric)), symmetric)
    variances = torch.rand(size, dtype=DOUBLE)
    torch.testing.assert_close(
        turn.back_of_variances(variances), (matrix.T @ variances.diag() @ matrix).diagonal()
    )
    first = density.prior.unflatten(torch.arange(size))["0.weight"].flatten()
    assert torch.equal(matrix[first], eye[first])


def test_what_records_do_not_tell_is_what_changes_no_probability():
    density, turn, *_ = turned()
    size = density.prior.dimension
    assert int((~turn.told).sum()) == HIDDEN + 1
    theta = torch.randn(size, dtype=DOUBLE)
    moved = theta + turn.back((~turn.told).double() * torch.randn(size, dtype=DOUBLE))
    assert not torch.allclose(theta, moved)
    for place in (theta, moved):
        gradient = turn.of(density.clipped_gradient_sum(place, 1e9))
        assert float(gradient[~turn.told].abs().max()) < 1e-4 * float(gradient.norm())
    torch.testing.assert_close(
        density.clipped_gradient_sum(theta, 1e9), density.clipped_gradient_sum(moved, 1e9)
    )


def test_sums_are_those_of_the_turned_gradients_of_each_record():
    """Each of them clipped: one at a time, by sums of single records."""
    density, turn, x, labels = turned()
    size = density.prior.dimension
    phi, matrix = torch.randn(size, dtype=DOUBLE), matrix_of(turn, size)
    rows = torch.autograd.functional.jacobian(
        lambda theta: losses(density.prior, theta, x, labels), matrix.T @ phi
    )
    clipped = rows * (BOUND / rows.norm(dim=1, keepdim=True)).clamp(max=1.0)
    assert bool((rows.norm(dim=1) > BOUND).any())
    clipped = clipped @ matrix.T
    sums = DensitySums(density, BOUND, torch.zeros_like(phi), turn.told, turn)
    some = phi * turn.told
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    every = DensitySums(density, BOUND, turn=turn)
    close(every.gradient_sum(phi), clipped.sum(0))
    close(every.curvature_diagonal(phi), clipped.square().sum(0))
    close(every.curvature_sum(phi), clipped.T @ clipped)
    # of those that are told alone
    close(sums.gradient_sum(some[turn.told]), every.gradient_sum(some)[turn.told])
    close(sums.curvature_sum(some[turn.told]), every.curvature_sum(some)[turn.told][:, turn.told])
    assert sums.clipped_count(some[turn.told]) == every.clipped_count(some)
    assert len(sums.site) == sums.dimension == int(turn.told.sum())


def losses(prior, theta, x, labels):
    """Of every record, by the layers' own formula."""
    values = prior.unflatten(theta)
    hidden = (x @ values["0.weight"].T + values["0.bias"]).tanh()
    return LOSS(hidden @ values["2.weight"].T + values["2.bias"], labels)


def posterior(curvature, n=4000):
    x = torch.randn(n, 2)
    x = x / x.norm(dim=1, keepdim=True)
    labels = torch.distributions.Categorical(logits=x @ torch.randn(2, 3)).sample()
    return laplace_for_module(
        nn.Linear(2, 3, bias=False),
        x,
        labels,
        loss=LOSS,
        prior_std=1.0,
        max_grad_norm=1.42,
        epsilon=8.0,
        delta=1e-5,
        curvature=curvature,
    )


@pytest.mark.parametrize("curvature", ["full", "diagonal"])
def test_what_classes_have_in_common_is_as_wide_as_the_prior(curvature):
    """And what tells them apart is not. Six standard errors of candidates drawn twice."""
    post = posterior(curvature)
    draws = post.sample(4000)["weight"]
    error = 6 / math.sqrt(2 * 4000 * 0.3)
    common, apart = draws.mean(1).std(0), (draws[:, 0] - draws[:, 1]).std(0)
    assert bool((common * math.sqrt(3) - 1).abs().lt(error).all())
    assert bool((apart < 0.5).all())
    assert post.transcript.output_basis.shape == (3, 3)


def test_moments_draws_and_density_of_a_turned_diagonal_agree():
    post = posterior("diagonal", n=300)
    draws = post.sample(20_000)["weight"].flatten(1).double()
    mean, std = post.mean["weight"].flatten(), post.stddev["weight"].flatten()
    error = 6 / math.sqrt(20_000)
    assert bool(((draws.mean(0) - mean) / std).abs().lt(error).all())
    assert bool((draws.std(0) / std - 1).abs().lt(3 * error).all())
    torch.testing.assert_close(post.unconstrained_stddev.float(), std, rtol=1e-4, atol=0.0)
    # of any density the mean of (x − mean)·score is −1 in each coordinate
    points = draws.requires_grad_()
    (score,) = torch.autograd.grad(post._mixture.log_density(points).sum(), points)
    products = (points.detach() - mean) * score
    assert bool((products.mean(0) + 1).abs().lt(6 * products.std(0) / math.sqrt(20_000)).all())


def test_a_layer_whose_parameters_are_others_is_not_turned():
    """Of tied weights only the first name is a parameter."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(2, 2, bias=False)
            self.last = nn.Linear(2, 2, bias=False)
            self.last.weight = self.first.weight

        def forward(self, x):
            return self.last(self.first(x))

    net, x, labels = Tied(), torch.randn(9, 2), torch.randint(2, (9,))
    density = RecordDensity(model_of_module(net, LOSS, 1.0), (x, labels), count_is_public=True)
    coupling = coupled_outputs(net, LOSS, x, labels)
    assert coupling.layer == "last" and turn_of_layer(density.prior, coupling) is None
