"""Gradients without their zeros: the sums are those of whole vectors, whatever a model picks."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.func import grad, vmap

from torch_dpbayes.density import RecordDensity

pytestmark = pytest.mark.usefixtures("double")
COUNT, GROUPS = 300, 7


def effects(name="effect"):
    with pyro.plate(f"{name}s", GROUPS):
        return pyro.sample(name, dist.Normal(0.0, 1.0))


def picking(group, x, y):
    """A slope, and each record's own entry of one latent."""
    effect, slope = effects(), pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(effect[group] + slope * x, 1.0), obs=y)


def crossed(group, other, y):
    """Entries of two latents."""
    first, second = effects("first"), effects("second")
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(first[group] * second[other], 1.0), obs=y)


def pairs(group, other, y):
    """Two entries of the same latent."""
    ability = effects("ability")
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=ability[group] - ability[other]), obs=y)


def scaled(group, x, y):
    """What is picked is a function of several latents."""
    effect, spread = effects(), pyro.sample("spread", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal((spread.exp() * effect)[group], 1.0), obs=y)


def groups():
    return torch.randint(GROUPS, (COUNT,))


def at(values, number):
    return values[number[None]][0]  # vmap would look at a number alone


NORMAL = torch.distributions.Normal(0.0, 1.0)
MODELS = {  # the term of a record, θ being the sites sorted by name; and whether pieces are used
    "picking": (
        picking,
        lambda: (groups(), torch.randn(COUNT), 3 * torch.randn(COUNT)),
        lambda t, g, x, y: NORMAL.log_prob(y - at(t, g) - t[GROUPS] * x),
        True,
    ),
    "crossed": (
        crossed,
        lambda: (groups(), groups(), 3 * torch.randn(COUNT)),
        lambda t, g, o, y: NORMAL.log_prob(y - at(t, g) * at(t[GROUPS:], o)),
        True,
    ),
    "pairs": (
        pairs,
        lambda: (groups(), groups(), torch.bernoulli(torch.full((COUNT,), 0.5))),
        lambda t, g, o, y: -torch.nn.functional.softplus((1 - 2 * y) * (at(t, g) - at(t, o))),
        False,
    ),
    "scaled": (
        scaled,
        lambda: (groups(), torch.randn(COUNT), 3 * torch.randn(COUNT)),
        lambda t, g, x, y: NORMAL.log_prob(y - at(t[GROUPS].exp() * t[:GROUPS], g)),
        None,
    ),
}


def expected(term, theta, data, bound):
    """The sum of clipped gradients."""
    rows = vmap(grad(term), in_dims=(None, 0, 0, 0))(theta, *data)
    rows = rows * (bound / rows.norm(dim=1, keepdim=True)).clamp(max=1.0)
    return rows.sum(0)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_sums_are_those_of_whole_vectors(name):
    model, make, term, _ = MODELS[name]
    data = make()
    density = RecordDensity(model, data, chunk_bytes=2**14)  # more than one chunk
    theta = torch.randn(density.prior.dimension)
    for bound in (0.5, 1e9):
        total = expected(term, theta, data, bound)
        torch.testing.assert_close(density.clipped_gradient_sum(theta, bound), total)
    chosen = torch.rand(COUNT) < 0.5
    some = expected(term, theta, [values[chosen] for values in data], 1e9)
    torch.testing.assert_close(density.gradient_sum(theta, chosen), some)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_where_a_record_picks_one_entry_its_zeros_are_left_out(name):
    model, make, _, used = MODELS[name]
    density = RecordDensity(model, make())
    program = density._gradients
    made = program(density.made_up.theta, density.made_up.rows(program.rows))
    assert used is None or any(piece.column is not None for piece in made) == used


@pytest.mark.thorough
def test_indices_may_count_from_the_end_and_records_without_an_entry_count_as_zero():
    model, make, term, _ = MODELS["picking"]
    group, x, y = make()
    theta = torch.randn(GROUPS + 1)
    total = expected(term, theta, (group, x, y), 0.7)
    from_the_end = torch.where(torch.rand(COUNT) < 0.5, group, group - GROUPS)
    density = RecordDensity(model, (from_the_end, x, y))
    torch.testing.assert_close(density.clipped_gradient_sum(theta, 0.7), total)
    for wrong in (GROUPS, -GROUPS - 1, 10**12):
        odd = group.clone()
        odd[3] = wrong
        others = torch.arange(COUNT) != 3
        total = expected(term, theta, [v[others] for v in (group, x, y)], 0.7)
        density = RecordDensity(model, (odd, x, y))
        torch.testing.assert_close(density.clipped_gradient_sum(theta, 0.7), total)


def test_a_record_whose_number_is_not_finite_counts_as_zero():
    model, make, term, _ = MODELS["picking"]
    group, x, y = make()
    y[5], y[7] = torch.nan, torch.inf
    theta, sound = torch.randn(GROUPS + 1), y.isfinite()
    total = expected(term, theta, [v[sound] for v in (group, x, y)], 0.7)
    density = RecordDensity(model, (group, x, y))
    torch.testing.assert_close(density.clipped_gradient_sum(theta, 0.7), total)
