"""One training run with canaries: what is seen of them is what theory says."""

import random
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import support.steps
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from scipy import stats
from support import training
from support.audits import charged
from support.training import recorded
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.accounting.events import GaussianDpEvent
from torch_dpbayes.audit import one_run, training_run
from torch_dpbayes.audit.bounds import gaussian_epsilon
from torch_dpbayes.audit.transcripts import generator_of

ALPHA = 1e-6  # of each comparison


def records(number=40):
    return TensorDataset(torch.randn(number, 6), torch.randint(0, 3, (number,)))


def private(dataset, engine, *, net=None, rate=1.0, z=2.0, factory=dpb.optim.DPSGLD, **options):
    net = net or nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))
    settings = {"lr": options.pop("lr", 0.01), "temperature": options.pop("temperature", 1e-8)}
    options |= {"optimizer": partial(factory, **settings), "max_grad_norm": 0.5}
    options |= {"engine": engine, "loader": {"num_workers": options.pop("workers", 0)}}
    return training.private(net, dataset, round(rate * len(dataset)), noise_multiplier=z, **options)


def train(dataset, engine, *, steps=3, **options):
    """The usual loop; returns the model."""
    net, optimizer, loader = private(dataset, engine, **options)
    support.steps.train(net, optimizer, loader, steps)
    return net


def seen_by(train, number=150, seed=None):
    """What each release says of each canary, in units of what it adds; which were in; the scores
    that were judged; and where canaries are, and on which side, at each release.
    """
    rows, kept, drawn = [], {}, []

    class Watched(training_run.GradientCanaries):
        def _score(self, layout):
            total = (layout.gradient * self._batch_size - self._others) / self._bound
            rows.append(total.double().numpy()[self._along] * self._signs)
            drawn.append((self._included.tolist(), self._along.tolist(), self._signs.tolist()))
            super()._score(layout)

    def judged(scores, included, **options):
        kept.update(scores=scores, included=included)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run, "GradientCanaries", Watched)
        patch.setattr(training_run, "from_scores", judged)
        one_run(train, records(), num_canaries=number, delta=1e-5, seed=seed)
    return np.array(rows), kept["included"], kept["scores"], drawn


def fits(sample, law):
    return stats.kstest(np.ravel(sample), law).pvalue > ALPHA


def shows(seen, included, z):
    """Each canary that is in as N(1, z²), others as N(0, z²)."""
    for is_in in (0, 1):
        assert fits(seen[:, included == is_in], stats.norm(is_in, z).cdf)


@pytest.mark.chance(2 * ALPHA)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"factory": dpb.optim.DPSGNHT, "lr": 1e-6},
        {"factory": dpb.optim.DPSGHMC},
        {"factory": partial(dpb.optim.DPSGFS, fisher="diagonal")},
        recorded("vmap"),
        recorded("hooks"),
    ],
)
def test_a_full_batch_shows_each_canary_as_a_gaussian(options):
    """The rest of the sum is taken away, whatever the records are; two trainings count as one."""

    def twice(dataset, engine):
        train(dataset, engine, steps=2, **options)
        return train(dataset, engine, steps=2, **options)

    seen, included, scores, _ = seen_by(twice)
    assert seen.shape == (4, 150)
    shows(seen, included, 2)
    # the score is the logarithm of the ratio of the two densities
    ratio = (stats.norm.logpdf(seen, 1, 2) - stats.norm.logpdf(seen, 0, 2)).sum(0)
    assert scores == pytest.approx(ratio, abs=1e-3)


@pytest.mark.chance(4 * ALPHA)
def test_poisson_batches_draw_canaries_as_records():
    """With probability q a canary adds C, else nothing."""
    seen, included, scores, _ = seen_by(partial(train, rate=0.3, z=0.1, steps=12))
    joined = seen[:, included] > 0.5
    assert stats.binomtest(int(joined.sum()), joined.size, 0.3).pvalue > ALPHA
    assert fits(seen[:, included][joined] - 1, stats.norm(0, 0.1).cdf)
    assert fits(seen[:, included][~joined], stats.norm(0, 0.1).cdf)
    assert fits(seen[:, ~included], stats.norm(0, 0.1).cdf)
    absent, present = (stats.norm.logpdf(seen, mean, 0.1) for mean in (0, 1))
    mixture = np.logaddexp(np.log(0.7) + absent, np.log(0.3) + present)
    assert scores == pytest.approx((mixture - absent).sum(0), abs=1e-2)


def in_parts(dataset, engine):
    """By Opacus' BatchMemoryManager."""
    net, optimizer, loader = private(dataset, engine, z=0.05)
    for _ in range(2):
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=33, optimizer=optimizer
        ) as parts:
            support.steps.train(net, optimizer, parts)


def after_failures(dataset, engine):
    """Every second step fails, and leaves nothing."""
    net, optimizer, loader = private(dataset, engine, z=0.05)
    charge, attempts = optimizer.accountant.compose, iter((0, 1, 0, 1))

    def charged(*args, **options):
        if not next(attempts):
            raise RuntimeError("a full disk")
        return charge(*args, **options)

    optimizer.accountant.compose = charged
    for _ in range(4):
        with suppress(RuntimeError):
            support.steps.train(net, optimizer, loader)


@pytest.mark.chance(2 * ALPHA)
@pytest.mark.parametrize("run", [in_parts, after_failures])
def test_a_release_of_several_parts_and_after_a_failure_is_one_release(run):
    seen, included, *_ = seen_by(run)
    assert seen.shape == (2, 150)
    shows(seen, included, 0.05)


def test_an_audit_leaves_the_random_numbers_of_the_training_alone():
    """Inclusion, directions and scores draw nothing that the training draws."""
    drawn, data = [], records()

    def draw():
        drawn.append((torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()))

    def train_and_draw(dataset, engine):
        train(dataset, engine)
        draw()

    for seed in (None, 7):
        for seeded in (torch.manual_seed, np.random.seed, random.seed):
            seeded(7)
        one_run(train_and_draw, data, num_canaries=100, delta=1e-5, seed=seed)
        draw()
    torch.seed()
    assert drawn == 2 * drawn[:2]
    # nor a training that takes the auditor's seed
    assert generator_of(7).random() != np.random.default_rng(7).random()


def test_a_seed_repeats_inclusion_and_directions():
    """Each canary along a parameter of its own, another one in each step."""
    first, again, other = (seen_by(train, 100, seed)[-1] for seed in (3, 3, 4))
    assert first == again != other
    assert len(set(first[0][1])) == 100 and first[0][1] != first[1][1]


@pytest.mark.chance(1e-6)
def test_the_bound_of_a_run():
    """Above 0 beyond doubt, and below the stated ε, which it passes in less than one run of 10¹⁰:
    the bound of a typical run is half of it. An earlier charge of the account counts.
    """
    accountant = charged(GaussianDpEvent(5.0))
    options = {"num_canaries": 120, "delta": 1e-5, "confidence": 0.99, "accountant": accountant}
    result = one_run(partial(train, z=0.5, steps=2), records(), **options)
    assert 0 < result.epsilon_lower_bound < result.epsilon and not result.is_refuted
    assert result.epsilon == pytest.approx(gaussian_epsilon((2 / 0.5**2 + 0.04) ** 0.5, 1e-5))
    assert result.guesses.canaries == 120 and result.threat.startswith("white-box")


@pytest.mark.chance(0.015, looks=3)
def test_records_as_canaries_show_in_a_model_that_learns_them_by_heart():
    """With hardly any noise, mislabelled records among few others; with much of it, they do not.
    None of 200 runs failed.
    """
    data = TensorDataset(torch.randn(60, 300), torch.zeros(60, dtype=torch.long))
    odd = [(torch.randn(300), torch.tensor(1 + i % 2)) for i in range(60)]

    def learn(dataset, engine, z):
        return train(dataset, engine, steps=40, z=z, net=nn.Linear(300, 3), lr=1.0)

    options = {"num_canaries": 60, "canaries": odd, "delta": 1e-5, "num_guesses": 40}
    loud = one_run(partial(learn, z=0.03), data, **options)
    assert loud.epsilon_lower_bound > 0.2 and loud.threat.startswith("black-box")
    quiet = one_run(partial(learn, z=500.0), data, **options, confidence=1 - 1e-9)
    assert quiet.epsilon_lower_bound <= quiet.epsilon
