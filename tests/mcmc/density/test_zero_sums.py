"""Latents whose gradients add up to zero, whatever the records are."""

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_dpbayes.mcmc.density import RecordDensity
from torch_dpbayes.ops.pyro_model import model_of_module

RECORDS, FEATURES, CLASSES = 20, 3, 4
CROSS_ENTROPY = partial(functional.cross_entropy, reduction="none")


def net(*more, classes=CLASSES, bias=True):
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, classes, bias=bias), *more)


def with_pull(outputs, labels):
    """A softmax whose logarithm of the normaliser is held near zero, by some ten times as much as
    is taken for rounding.
    """
    pull = 1e-12 if outputs.dtype == torch.float64 else 1e-5
    return CROSS_ENTROPY(outputs, labels) + pull * outputs.logsumexp(1).square()


def of_reference(outputs, labels):
    return CROSS_ENTROPY(functional.pad(outputs, (0, 1)), labels)


def of_tasks(outputs, labels):
    """Three classes and, of some records, a number. Of made-up rows only counts are such."""
    return CROSS_ENTROPY(outputs[:, :3], labels) + (labels == 2) * outputs[:, 3].square()


def of_groups(outputs, labels):
    """Which of two groups, and which of its classes: what each softmax has in common does not
    count, but only what all of them have is looked for.
    """
    group = labels % 2
    members = torch.where((group == 0)[:, None], outputs[:, 2:5], outputs[:, 5:8])
    return CROSS_ENTROPY(outputs[:, :2], group) + CROSS_ENTROPY(members, labels % 3)


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.one(x) + self.other(x.square())


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, 2)

    def forward(self, x):
        return torch.cat([self.layer(x), self.layer(x.square())], dim=1)


class Normed(nn.Linear):
    def forward(self, x):
        return x @ (self.weight / self.weight.norm(dim=1, keepdim=True)).T


class Tied(nn.Module):
    """The first name of what both layers have is that of the last one."""

    def __init__(self):
        super().__init__()
        self.last, self.first = (nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(2))
        self.first.weight = self.last.weight

    def forward(self, x):
        return self.last(self.first(x).tanh())


class OfShares(nn.Linear):
    """Of numbers between 0 and 1: some normal ones, and all counts, give no finite gradients."""

    def forward(self, x):
        return super().forward(x.logit())


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.scale = nn.Parameter(torch.ones(CLASSES))

    def forward(self, x):
        return self.layer(x) * self.scale


def density_of(module, loss, labels=None):
    x = torch.randn(RECORDS, FEATURES)
    labels = torch.randint(2, (RECORDS,)) if labels is None else labels
    return RecordDensity(model_of_module(module, loss, 1.0), (x, labels), count_is_public=True)


def shapes_of(places):
    return sorted(tuple(rows.shape) for rows in places)


@pytest.mark.parametrize(
    "module, loss, shapes",
    [
        (net(), CROSS_ENTROPY, [(4, 1), (4, 5)]),
        (net(bias=False), CROSS_ENTROPY, [(4, 5)]),
        (net(), partial(CROSS_ENTROPY, label_smoothing=0.1), [(4, 1), (4, 5)]),
        (net(), partial(CROSS_ENTROPY, ignore_index=0), [(4, 1), (4, 5)]),
        (
            net(nn.LogSoftmax(1)),
            partial(functional.nll_loss, reduction="none"),
            [(4, 1), (4, 5)],
        ),
        (net(classes=8), of_groups, [(8, 1), (8, 5)]),
        (Sum(), CROSS_ENTROPY, [(4, 1), (4, 1), (4, 3), (4, 3)]),
        (Twice(), CROSS_ENTROPY, [(2, 1)]),
        (OfShares(FEATURES, CLASSES), CROSS_ENTROPY, [(4, 1), (4, 3)]),
        (net(), with_pull, []),
        (net(), of_reference, []),
        (net(), of_tasks, []),
        (net(), lambda outputs, labels: outputs.square().sum(1), []),
        (net(nn.ReLU()), CROSS_ENTROPY, []),
        (Normed(FEATURES, CLASSES, bias=False), CROSS_ENTROPY, []),
        (Tied(), CROSS_ENTROPY, []),
        (Scaled(), CROSS_ENTROPY, []),
    ],
)
def test_what_adds_up_to_zero_is_found_and_nothing_else(module, loss, shapes):
    density = density_of(module, loss)
    found = density.zero_sums()
    assert shapes_of(found) == shapes


@pytest.mark.parametrize("loss, count", [(CROSS_ENTROPY, 2), (with_pull, 0)])
def test_it_is_found_in_float64(loss, count):
    data = torch.randn(RECORDS, FEATURES, dtype=torch.float64), torch.ones(RECORDS).long()
    model = model_of_module(net().double(), loss, 1.0)
    assert len(RecordDensity(model, data, count_is_public=True).zero_sums()) == count


def test_the_classes_of_a_pyro_model_may_be_its_last_dimension():
    def model(x, labels):
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        weights = pyro.sample("w", dist.Normal(torch.zeros(FEATURES, CLASSES), 1.0).to_event(2))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Categorical(logits=scale * x @ weights), obs=labels)

    data = torch.randn(RECORDS, FEATURES), torch.randint(CLASSES, (RECORDS,))
    density = RecordDensity(model, data, count_is_public=True)
    (rows,) = density.zero_sums()
    places = density.prior.unflatten(torch.arange(density.prior.dimension))
    assert torch.equal(rows, places["w"].T)


def density_of_scores(scores, prior):
    """Of a class for each entry of a latent."""

    def model(labels):
        found = scores(pyro.sample("w", prior.to_event(len(prior.batch_shape)))).flatten()
        with pyro.plate("data", len(labels)):
            pyro.sample("y", dist.Categorical(logits=found), obs=labels)

    return RecordDensity(model, (torch.randint(2, (RECORDS,)),), count_is_public=True)


@pytest.mark.parametrize("scores", [torch.abs, lambda w: w + (w - 10).relu().square()])
def test_it_has_to_be_so_at_draws_of_the_prior_and_near_zero(scores):
    """It is so at one of the two."""
    density = density_of_scores(scores, dist.Normal(torch.full((10,), 20.0), 0.1))
    assert density.zero_sums() == []


def test_no_entry_belongs_to_two():
    """What all rows and all columns of a latent have in common is not told."""
    scores = lambda w: w - w.mean(0) - w.mean(1, keepdim=True)  # noqa: E731
    density = density_of_scores(scores, dist.Normal(torch.zeros(3, 4), 1.0))
    assert shapes_of(density.zero_sums()) == [(3, 4)]


def test_neither_records_nor_trained_values_nor_the_random_state_count():
    """A fit to the records is not public, and nobody's seed moves."""
    module = net()
    state = torch.get_rng_state()
    before = density_of(module, CROSS_ENTROPY).zero_sums()
    torch.set_rng_state(state)
    density_of(module, CROSS_ENTROPY)
    seen = torch.get_rng_state()
    torch.set_rng_state(state)
    density = density_of(module, CROSS_ENTROPY)
    density.zero_sums()
    assert torch.equal(torch.get_rng_state(), seen)
    with torch.no_grad():
        module[2].bias.copy_(torch.tensor([0.0, 0.0, -90.0, -90.0]))
    after = density_of(module, CROSS_ENTROPY, torch.zeros(RECORDS).long()).zero_sums()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("groups", [10, 2])
def test_rows_of_groups_that_made_up_rows_do_not_have_are_found(groups):
    """Or that made-up counts are too large for."""

    def model(group, labels):
        weights = pyro.sample("w", dist.Normal(torch.zeros(groups, 3), 1.0).to_event(2))
        with pyro.plate("data", len(group)):
            pyro.sample("y", dist.Categorical(logits=weights[group]), obs=labels)

    data = torch.randint(groups, (RECORDS,)), torch.randint(3, (RECORDS,))
    (rows,) = RecordDensity(model, data, count_is_public=True).zero_sums()
    assert rows.shape == (3, groups)


def test_a_prior_that_has_no_draws_is_no_error(monkeypatch):
    density = density_of(net(), CROSS_ENTROPY)

    def none(count):
        raise ValueError("no draw has a density")

    monkeypatch.setattr(density.prior, "samples", none)
    assert len(density.zero_sums()) == 2
