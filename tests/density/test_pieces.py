"""Gradients without their zeros: the sums are those of whole vectors, whatever a model picks."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from support.pyro_models import gaussian
from torch.func import grad, vmap

from torch_dpbayes.density import RecordDensity, program

pytestmark = pytest.mark.usefixtures("double")
COUNT, GROUPS = 300, 7
NORMAL = torch.distributions.Normal(0.0, 1.0)


def effects(name="effect"):
    with pyro.plate(f"{name}s", GROUPS):
        return pyro.sample(name, dist.Normal(0.0, 1.0))


def picking(group, x, y):
    """A slope, and each record's own entry of one latent."""
    gaussian(y, effects()[group] + pyro.sample("slope", dist.Normal(0.0, 1.0)) * x)


def crossed(group, other, y):
    """Entries of two latents."""
    gaussian(y, effects("first")[group] * effects("second")[other])


def pairs(group, other, y):
    """Two entries of the same latent."""
    ability = effects("ability")
    gaussian(y, ability[group] - ability[other])


def scaled(group, x, y):
    """What is picked is a function of several latents."""
    gaussian(y, (pyro.sample("spread", dist.Normal(0.0, 1.0)).exp() * effects())[group])


def groups():
    return torch.randint(GROUPS, (COUNT,))


def at(values, number):
    return values[number[None]][0]  # vmap would look at a number alone


MODELS = {  # the mean of a record, θ being the sites sorted by name; and whether pieces are used
    "picking": (picking, torch.randn, lambda t, g, x: at(t, g) + t[GROUPS] * x, True),
    "crossed": (crossed, groups, lambda t, g, o: at(t, g) * at(t[GROUPS:], o), True),
    "pairs": (pairs, groups, lambda t, g, o: at(t, g) - at(t, o), False),
    "scaled": (scaled, torch.randn, lambda t, g, x: at(t[GROUPS].exp() * t[:GROUPS], g), None),
}


def made(name):
    model, second, mean, used = MODELS[name]
    data = groups(), second(COUNT) if second is torch.randn else second(), 3 * torch.randn(COUNT)
    return model, data, lambda t, g, x, y: NORMAL.log_prob(y - mean(t, g, x)), used


def expected(term, theta, data, bound):
    """The sum of clipped gradients."""
    rows = vmap(grad(term), in_dims=(None, 0, 0, 0))(theta, *data)
    rows = rows * (bound / rows.norm(dim=1, keepdim=True)).clamp(max=1.0)
    return rows.sum(0)


@pytest.mark.parametrize("name", MODELS)
def test_sums_are_those_of_whole_vectors(name, monkeypatch):
    monkeypatch.setattr(program, "_CHUNK_BYTES", 2**14)  # more than one chunk
    model, data, term, used = made(name)
    density = RecordDensity(model, data)
    theta = torch.randn(density.prior.dimension)
    for bound in (0.5, 1e9):
        total = expected(term, theta, data, bound)
        torch.testing.assert_close(density.clipped_gradient_sum(theta, bound), total)
    chosen = torch.rand(COUNT) < 0.5
    some = expected(term, theta, [values[chosen] for values in data], 1e9)
    torch.testing.assert_close(density.gradient_sum(theta, chosen), some)
    # where a record picks one entry its zeros are left out
    gradients = density._gradients
    pieces = gradients(theta, density.made_up.rows(gradients.rows), gradients.rows)
    assert used is None or any(piece.column is not None for piece in pieces) == used


def test_indices_may_count_from_the_end_and_odd_records_count_as_zero():
    model, (group, x, y), term, _ = made("picking")
    theta = torch.randn(GROUPS + 1)
    from_the_end = torch.where(torch.rand(COUNT) < 0.5, group, group - GROUPS)
    density = RecordDensity(model, (from_the_end, x, y))
    total = expected(term, theta, (group, x, y), 0.7)
    torch.testing.assert_close(density.clipped_gradient_sum(theta, 0.7), total)
    kept = torch.arange(COUNT) != 3
    total = expected(term, theta, [values[kept] for values in (group, x, y)], 0.7)
    for wrong in (GROUPS, -GROUPS - 1, 10**12):
        odd = density.with_rows([torch.where(kept, group, wrong), x, y])
        torch.testing.assert_close(odd.clipped_gradient_sum(theta, 0.7), total)
    for value in (torch.nan, torch.inf):
        odd = density.with_rows([group, x, torch.where(kept, y, value)])
        torch.testing.assert_close(odd.clipped_gradient_sum(theta, 0.7), total)
