"""Entries that have the same prior, and such as nearly have."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from torch_dpbayes.mcmc.density import Prior, is_exchangeable

ENTRIES, COLUMNS = 3, 2


def site(name, distribution):
    return pyro.sample(name, distribution.to_event(len(distribution.batch_shape)))


def of_columns(*, apart=0.0, wider=0.0, loc=0.0, scale=1.0, columns=COLUMNS, kind=dist.Normal):
    """Each column has a mean and a width of its own, and the last entry of the last column others
    than those before.
    """
    more = torch.zeros(ENTRIES, columns)
    more[-1, -1] = 1.0
    own = 1 + torch.arange(columns)
    site("w", kind(loc * own + apart * more, scale * own * (1 + wider * more)))


def of_scale():
    site("w", dist.Normal(torch.ones(ENTRIES, COLUMNS), site("a", dist.LogNormal(0.0, 1.0))))


def of_scales_of_columns():
    """As many as there are entries: none of them belongs to an entry."""
    site("w", dist.Laplace(torch.ones(ENTRIES, 3), site("a", dist.Gamma(torch.ones(3), 2.0))))


def of_levels(wider=0.0):
    """An entry's two latents have a level in common."""
    prior = dist.Normal(torch.zeros(ENTRIES), torch.tensor([1.0, 1.0, 1 + wider]))
    levels = site("a", prior)
    site("w", dist.Normal(levels[:, None].expand(ENTRIES, COLUMNS), 1.0))
    site("z", dist.Normal(levels, 1.0))


def of_covariance(neighbours, opposite):
    """Of four entries in a ring."""
    row = torch.tensor([1.0, neighbours, opposite, neighbours])
    covariance = torch.stack([row.roll(k) for k in range(4)])
    pyro.sample("w", dist.MultivariateNormal(torch.zeros(4), covariance))


def priors_of(*cases):
    return pytest.mark.parametrize("model, given", cases)


def is_so(model, given, dtype):
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        prior = Prior(lambda: model(**given))
        places = prior.unflatten(torch.arange(prior.dimension))["w"]
        return is_exchangeable(prior, places.reshape(len(places), -1))
    finally:
        torch.set_default_dtype(default)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@priors_of(
    (of_columns, {}),
    (of_scale, {}),
    (of_levels, {}),
    (of_scales_of_columns, {}),
    (of_columns, {"loc": 1e4}),
    (of_columns, {"kind": dist.Cauchy}),
    (of_columns, {"columns": 2_000}),
    (of_covariance, {"neighbours": 0.3, "opposite": 0.3}),
)
def test_the_same_prior_is_found(model, given, dtype):
    assert is_so(model, given, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@priors_of(
    (of_columns, {"wider": 0.01}),
    (of_levels, {"wider": 0.01}),
    (of_columns, {"apart": 0.01, "kind": dist.Laplace}),  # no slope of two points on a side tells
    (of_columns, {"apart": 0.01, "loc": 1e4}),  # and none near 0
    (of_columns, {"wider": 0.01, "loc": 1.0, "scale": 1e-9}),  # all draws are 1 in float32
    (of_columns, {"wider": 0.01, "columns": 2_000}),  # of the least slopes of all
    (of_columns, {"wider": 0.01, "kind": dist.Cauchy}),
    (of_columns, {"wider": 0.01, "kind": dist.LogNormal}),
    (of_covariance, {"neighbours": 0.3, "opposite": 0.0}),  # the same for all as far as the ring
)
def test_other_priors_are_told_from_it(model, given, dtype):
    """Ones that differ by a hundredth of a width. Twenty draws all miss one case in a million."""
    assert not is_so(model, given, dtype)


def test_neither_the_random_state_nor_draws_are_needed(monkeypatch):
    """Priors that have hardly any draws with a density included."""
    prior = Prior(of_columns)
    places = torch.arange(prior.dimension).reshape(ENTRIES, COLUMNS)
    state = torch.get_rng_state()
    assert is_exchangeable(prior, places)

    def none(count):
        raise ValueError("no draw has a density")

    monkeypatch.setattr(prior, "samples", none)
    assert is_exchangeable(prior, places)
    assert torch.equal(torch.get_rng_state(), state)


def test_where_no_density_can_be_computed_nothing_is_said(monkeypatch):
    prior = Prior(of_columns)
    places = torch.arange(prior.dimension).reshape(ENTRIES, COLUMNS)

    def fails(thetas):
        raise torch.linalg.LinAlgError

    monkeypatch.setattr(prior, "log_densities_and_gradients", fails)
    assert not is_exchangeable(prior, places)
    known = Prior(of_columns).log_densities_and_gradients

    def is_so_with(points):
        """How many of the points have gradients."""
        left = [points]

        def some(thetas):
            values, gradients = known(thetas)
            left[0] -= 1
            return values, gradients if left[0] >= 0 else gradients * torch.nan

        monkeypatch.setattr(prior, "log_densities_and_gradients", some)
        return is_exchangeable(prior, places)

    assert is_so_with(1) and not is_so_with(0)
