"""Gradients without their zeros: the sums are those of whole vectors, whatever a model picks."""

import math

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


def linear(group, x, y):
    """Of which the gradient needs no entry, but its place alone."""
    effect = effects()
    with pyro.plate("data", len(y)):
        pyro.factor("term", effect[group] * x * y)


def indices(count):
    return torch.randint(GROUPS, (count,))


def normal(mean):
    return lambda t, g, x, y: NORMAL.log_prob(y - mean(t, g, x))


def at(values, number):
    return values[number[None]][0]  # vmap would look at a number alone


MODELS = {  # a record's term, θ being the sites sorted by name; and whether pieces are used
    "picking": (picking, torch.randn, normal(lambda t, g, x: at(t, g) + t[GROUPS] * x), True),
    "crossed": (crossed, indices, normal(lambda t, g, o: at(t, g) * at(t[GROUPS:], o)), True),
    "pairs": (pairs, indices, normal(lambda t, g, o: at(t, g) - at(t, o)), False),
    "linear": (linear, torch.randn, lambda t, g, x, y: at(t, g) * x * y, True),
}


def expected(term, theta, data, bound):
    """The sum of clipped gradients."""
    rows = vmap(grad(term), in_dims=(None, 0, 0, 0))(theta, *data)
    rows = rows * (bound / rows.norm(dim=1, keepdim=True)).clamp(max=1.0)
    return rows.sum(0)


@pytest.mark.parametrize("name", MODELS)
def test_sums_are_those_of_whole_vectors(name, monkeypatch):
    """Of records some of which count their index from the end; odd ones count as zero."""
    monkeypatch.setattr(program, "_CHUNK_BYTES", 2**14)  # more than one chunk
    model, second, term, used = MODELS[name]
    group, others = indices(COUNT), [second(COUNT), 3 * torch.randn(COUNT)]
    from_the_end = torch.where(torch.rand(COUNT) < 0.5, group, group - GROUPS)
    density = RecordDensity(model, (from_the_end, *others))
    data, theta = (group, *others), torch.randn(density.prior.dimension)
    for bound in (0.5, 1e9):
        total = expected(term, theta, data, bound)
        torch.testing.assert_close(density.clipped_gradient_sum(theta, bound), total)
    chosen = torch.rand(COUNT) < 0.5
    some = expected(term, theta, [values[chosen] for values in data], 1e9)
    torch.testing.assert_close(density.clipped_gradient_sum(theta, math.inf, chosen), some)
    terms = vmap(term, in_dims=(None, 0, 0, 0))(theta, *data)
    few = torch.randperm(COUNT)[:50]
    torch.testing.assert_close(density.of(few).log_likelihoods(theta), terms[few])
    # where a record picks one entry its zeros are left out
    gradients = density._gradients
    pieces = gradients(theta, density.made_up.rows(gradients.rows), gradients.rows)
    assert any(piece.column is not None for piece in pieces) == used
    kept = torch.arange(COUNT) != 3
    total = expected(term, theta, [values[kept] for values in data], 0.7)
    for wrong in (GROUPS, -GROUPS - 1, 10**12):
        odd = density.with_rows([torch.where(kept, group, wrong), *others])
        torch.testing.assert_close(odd.clipped_gradient_sum(theta, 0.7), total)
    for value in (torch.nan, torch.inf):
        odd = density.with_rows([group, others[0], torch.where(kept, others[1], value)])
        torch.testing.assert_close(odd.clipped_gradient_sum(theta, 0.7), total)
