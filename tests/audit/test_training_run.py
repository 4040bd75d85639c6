"""One training run with canaries: what is seen of them is what theory says."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from scipy import stats
from support.training import recorded
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.audit import audited_engine, canaries, one_run

ALPHA = 1e-6  # of each comparison


def records(number=40):
    return TensorDataset(torch.randn(number, 6), torch.randint(0, 3, (number,)))


def train(dataset, engine, *, rate=1.0, steps=3, z=2.0, factory=None, **options):
    """The usual loop; returns the model."""
    net = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))
    loader = DataLoader(dataset, batch_size=round(rate * len(dataset)))
    net, opt, loader = engine.make_private(
        module=net,
        optimizer=factory or partial(dpb.optim.DPSGLD, lr=0.01, temperature=1e-8),
        data_loader=loader,
        max_grad_norm=0.5,
        noise_multiplier=z,
        **options,
    )
    taken = 0
    while taken < steps:
        for x, y in loader:
            nn.functional.cross_entropy(net(x), y).backward()
            opt.step()
            taken += 1
            if taken == steps:
                break
    return net


class Seen(canaries.GradientCanaries):
    """Keeps what each release says of each canary, in units of what it adds."""

    def __init__(self, coins, **options):
        super().__init__(coins, np.random.default_rng(), **options)
        self.rows = []

    def _sum(self, now):
        self.rows.append(now.toward(now))
        return super()._sum(now)


def seen_by(train, *, number=150, size=40, coins=None):
    coins = np.random.default_rng().random(number) < 0.5 if coins is None else coins
    watching = Seen(coins)
    engine = audited_engine.AuditedEngine(None, None, watching)
    train(canaries.WithPlaces(records(size), len(coins)), engine)
    return watching, coins


def fits(sample, law):
    return stats.kstest(np.ravel(sample), law).pvalue > ALPHA


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"factory": partial(dpb.optim.DPSGNHT, lr=1e-6, temperature=1e-8)},
        {"factory": partial(dpb.optim.DPSGHMC, lr=0.01, temperature=1e-8)},
        recorded("vmap"),
        recorded("hooks"),
    ],
)
@pytest.mark.first_cases(2)
def test_a_full_batch_shows_each_canary_as_a_gaussian(options):
    """The rest of the sum is taken away, whatever the records are."""
    watching, coins = seen_by(partial(train, z=2.0, steps=4, **options))
    seen = np.array(watching.rows)
    assert seen.shape == (4, 150)
    assert fits(seen[:, coins], stats.norm(1, 2).cdf)
    assert fits(seen[:, ~coins], stats.norm(0, 2).cdf)
    # the score is the logarithm of the ratio of the two densities
    ratio = (stats.norm.logpdf(seen, 1, 2) - stats.norm.logpdf(seen, 0, 2)).sum(0)
    assert watching.scores == pytest.approx(ratio, abs=1e-3)


def test_poisson_batches_draw_canaries_as_records():
    """With probability q a canary adds C, else nothing."""
    watching, coins = seen_by(partial(train, rate=0.3, z=0.1, steps=12))
    seen = np.array(watching.rows)
    joined = seen[:, coins] > 0.5
    assert stats.binomtest(int(joined.sum()), joined.size, 0.3).pvalue > ALPHA
    assert fits(seen[:, coins][joined] - 1, stats.norm(0, 0.1).cdf)
    assert fits(seen[:, coins][~joined], stats.norm(0, 0.1).cdf)
    assert fits(seen[:, ~coins], stats.norm(0, 0.1).cdf)


def test_parts_of_a_batch_are_one_batch():
    """Of Opacus' BatchMemoryManager."""

    def in_parts(dataset, engine):
        net = nn.Linear(6, 30)
        net, opt, loader = engine.make_private(
            module=net,
            optimizer=partial(dpb.optim.DPSGLD, lr=0.01, temperature=1e-8),
            data_loader=DataLoader(dataset, batch_size=len(dataset)),
            max_grad_norm=1.0,
            noise_multiplier=0.05,
        )
        for _ in range(3):
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=33, optimizer=opt
            ) as parts:
                for x, y in parts:
                    nn.functional.cross_entropy(net(x), y).backward()
                    opt.step()

    watching, coins = seen_by(in_parts)
    seen = np.array(watching.rows)
    assert seen.shape == (3, 150)
    assert fits(seen[:, coins], stats.norm(1, 0.05).cdf)
    assert fits(seen[:, ~coins], stats.norm(0, 0.05).cdf)


def test_nothing_is_left_of_a_step_that_failed():
    def after_a_failure(dataset, engine):
        net = nn.Linear(6, 30)
        net, opt, loader = engine.make_private(
            module=net,
            optimizer=partial(dpb.optim.DPSGLD, lr=0.01, temperature=1e-8),
            data_loader=DataLoader(dataset, batch_size=len(dataset)),
            max_grad_norm=1.0,
            noise_multiplier=0.05,
        )
        take_noise = opt.release.noise.require_usable
        for fails in (True, False, True, False):

            def usable(device, fails=fails):
                if fails:
                    raise RuntimeError("no entropy")
                take_noise(device)

            opt.release.noise.require_usable = usable
            for x, y in loader:
                nn.functional.cross_entropy(net(x), y).backward()
                try:
                    opt.step()
                except RuntimeError:
                    assert fails

    watching, coins = seen_by(after_a_failure)
    seen = np.array(watching.rows)
    assert seen.shape == (2, 150)
    assert fits(seen[:, coins], stats.norm(1, 0.05).cdf)


def test_fisher_scoring_gets_the_canaries_squares_too():
    """Σ g∘g of a canary that is in is C² along its parameter."""
    squares = []

    def without_records(dataset, engine):
        net, opt, loader = engine.make_private(
            module=nn.Linear(6, 3, bias=False),
            optimizer=partial(dpb.optim.DPSGFS, lr=0.01, temperature=1e-12, fisher="diagonal"),
            data_loader=DataLoader(dataset, batch_size=len(dataset)),
            max_grad_norm=0.5,
            noise_multiplier=1e-3,
        )
        score = opt.release.watch

        def watch(layout):
            squares.extend(layout.beside.tolist())
            score(layout)

        opt.release.watch = watch
        for x, _ in loader:
            (0.0 * net(x)).mean().backward()
            opt.step()

    seen_by(without_records, number=18, coins=np.arange(18) % 2 == 0)
    assert np.allclose(58 * np.sort(squares), [0.0] * 9 + [0.25] * 9, atol=0.01)


def test_a_sensitivity_scale_is_refused():
    factory = partial(
        dpb.optim.DPSGFS, lr=0.01, fisher="diagonal", sensitivity_scale=torch.ones(403)
    )
    with pytest.raises(ValueError, match="knows no sensitivity_scale"):
        seen_by(partial(train, factory=factory, steps=1), number=5)


def test_an_audit_leaves_the_random_numbers_of_the_training_alone():
    """Coins, directions and scores draw nothing that the training draws."""
    drawn, data = [], records()

    def train_and_draw(dataset, engine):
        net = train(dataset, engine)
        drawn.append((torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()))
        return net

    for seed in (None, 0, 7, 7):
        torch.manual_seed(7)
        np.random.seed(7)
        random.seed(7)
        one_run(train_and_draw, data, num_canaries=100, delta=1e-5, seed=seed)
        drawn.append((torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()))
    torch.seed()
    assert drawn == 4 * drawn[:2]


def test_a_seed_repeats_coins_and_directions():
    kept = []

    class Kept(canaries.GradientCanaries):
        def _released(self, layout):
            kept.append((self._coins.tolist(), self._along.tolist(), self._signs.tolist()))
            super()._released(layout)

    def coins_of(seed):
        kept.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch_dpbayes.audit.training_run.GradientCanaries", Kept)
            one_run(train, records(), num_canaries=100, delta=1e-5, seed=seed)
        return list(kept)

    first = coins_of(3)
    assert first == coins_of(3)
    assert first != coins_of(4)
    coins, along, _ = first[0]
    assert len(set(along)) == 100 and not set(along) & set(first[1][1])


@pytest.mark.parametrize("scores", ["sums", "differences"])
def test_the_bound_of_a_run(scores):
    """Beyond doubt above 0, and below the ε that is stated: it passes that in less than one run of
    10¹⁰, for the bound of a typical run is half of it.
    """
    result = one_run(
        partial(train, z=0.5, steps=2),
        records(),
        num_canaries=120,
        delta=1e-5,
        scores=scores,
        confidence=0.99,
    )
    assert 0 < result.epsilon_lower_bound < result.epsilon
    assert not result.is_refuted
    assert result.guesses.canaries == 120 and result.threat.startswith("white-box")
    assert scores in result.threat


def test_records_as_canaries_show_in_a_model_that_learns_them_by_heart():
    """With hardly any noise, mislabelled records among few others; with much of it, they do not."""
    data = TensorDataset(torch.randn(60, 300), torch.zeros(60, dtype=torch.long))
    odd = [(torch.randn(300), torch.tensor(1 + i % 2)) for i in range(60)]

    def learn(dataset, engine, z):
        net, opt, loader = engine.make_private(
            module=nn.Linear(300, 3),
            optimizer=partial(dpb.optim.DPSGLD, lr=1.0, temperature=1e-8),
            data_loader=DataLoader(dataset, batch_size=len(dataset)),
            max_grad_norm=1.0,
            noise_multiplier=z,
        )
        for _ in range(40):
            for x, y in loader:
                nn.functional.cross_entropy(net(x), y).backward()
                opt.step()
        return net

    options = {"num_canaries": 60, "canaries": odd, "delta": 1e-5, "num_guesses": 40}
    loud = one_run(partial(learn, z=0.03), data, **options)
    assert loud.epsilon_lower_bound > 0.2 and loud.threat.startswith("black-box")
    quiet = one_run(partial(learn, z=500.0), data, **options, confidence=1 - 1e-9)
    assert quiet.epsilon_lower_bound <= quiet.epsilon


# -- what does not make sense ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"num_canaries": 4},
            "4 canaries give no lower bound at 95% confidence: use num_canaries=8",
        ),
        ({"num_canaries": 0}, "num_canaries must be a positive integer, got 0"),
        ({"delta": None}, "pass delta=1e-5"),
        ({"delta": 1.5}, "delta is a probability"),
        ({"confidence": 1.0}, "confidence is a probability"),
        ({"bound": "tight"}, 'bound must be "gaussian", "independent" or "basic"'),
        ({"scores": "best"}, 'scores must be "sums" or "differences"'),
        ({"num_canaries": 5000}, "5000 canaries need as many parameters"),
        (
            {"canaries": [(torch.zeros(6), 1)] * 100, "bound": "independent"},
            "the losses of one model",
        ),
        ({"canaries": [(torch.zeros(6), 1)]}, "num_canaries = 100, but there are 1 canaries"),
        ({"canaries": [(torch.zeros(6), 1)] * 100}, "40 records cannot hide 100 canaries"),
        (
            {"num_canaries": 9, "canaries": [(torch.zeros(5), torch.tensor(1))] * 9},
            "canary 0 is none of this data set's records",
        ),
    ],
)
def test_what_makes_no_audit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        one_run(train, records(), **{"num_canaries": 100, "delta": 1e-5, **options})


@pytest.mark.parametrize(
    "options",
    [{"sampling": "fixed_size"}, {"sampling": "random_allocation"}, {"max_batch_size": 40}],
)
def test_guesses_are_not_independent_where_batches_are_drawn_otherwise(options):
    """One canary's place in a batch of fixed size is another one's absence. Refused before the
    first step, in a history too.
    """
    accountant = dpb.PrivacyAccountant()
    history = dpb.audit.History(accountant, num_canaries=100, delta=1e-5, bound="independent")
    for audit in (
        partial(one_run, num_canaries=100, delta=1e-5, bound="independent", accountant=accountant),
        history.train,
    ):
        with pytest.raises(
            ValueError, match=r"this loader draws .*batches.*: pass bound=.gaussian"
        ):
            audit(partial(train, rate=0.2, **options), records())
    assert len(accountant) == 0


def test_runs_over_batches_of_people_are_refused():
    """Before the first step, whether the loader or the accountant is the one that is of people."""
    ids = [i // 2 for i in range(len(records()))]
    of_people = dpb.PrivacyAccountant(unit="person")
    for accountant, options in (
        (None, {"user_ids": ids, "records_per_user": 2}),
        (of_people, {"user_ids": ids, "records_per_user": 2}),
        (of_people, {}),
    ):
        with pytest.raises(ValueError, match=r"shows nothing of the ε of users.*without user_ids="):
            one_run(
                partial(train, **options),
                records(),
                num_canaries=20,
                delta=1e-5,
                accountant=accountant,
            )
    assert len(of_people) == 0


@pytest.mark.parametrize(
    "value, target, message",
    [
        (float("nan"), 1, "canary 8 has loss nan before training"),
        (1.0, 3, r"the model or the loss fails on canary 8: Target 3 is out of bounds\."),
    ],
)
def test_canaries_that_the_model_cannot_take_are_refused_before_the_first_step(
    value, target, message
):
    canaries = [(torch.zeros(6), torch.tensor(1))] * 8
    canaries.append((torch.full((6,), value), torch.tensor(target)))
    accountant = dpb.PrivacyAccountant()
    with pytest.raises(ValueError, match=message):
        one_run(
            train,
            records(),
            num_canaries=9,
            canaries=canaries,
            delta=1e-5,
            accountant=accountant,
        )
    assert len(accountant) == 0


def test_a_model_that_the_check_refuses_is_refused_in_an_audit_too():
    def normalises(dataset, engine):
        return engine.make_private(
            module=nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 3)),
            optimizer=partial(dpb.optim.DPSGLD, lr=0.01),
            data_loader=DataLoader(dataset, batch_size=len(dataset)),
            max_grad_norm=0.5,
        )

    with pytest.raises(ValueError, match="BatchNorm"):
        one_run(normalises, records(), num_canaries=100, delta=1e-5)


def test_a_budget_too_small_for_any_bound_is_refused_before_the_run():
    def never(dataset, engine):
        raise AssertionError("trained all the same")

    with pytest.raises(
        ValueError, match=r"100 canaries give no lower bound .* epsilon = 0.05: use more"
    ):
        one_run(
            never,
            records(),
            num_canaries=100,
            accountant=dpb.PrivacyAccountant(epsilon=0.05, delta=1e-5),
        )


def test_training_without_the_engine_or_without_noise_is_refused():
    def elsewhere(dataset, engine):
        return train(records(), dpb.PrivacyEngine())

    def twice(dataset, engine):
        train(dataset, engine)
        train(dataset, engine)

    def in_workers(dataset, engine):
        loader = DataLoader(dataset, batch_size=len(dataset), num_workers=1)
        engine.make_private(
            module=nn.Linear(6, 30),
            optimizer=partial(dpb.optim.DPSGLD, lr=0.1),
            data_loader=loader,
            max_grad_norm=1.0,
        )

    cold = partial(dpb.optim.DPSGLD, lr=0.01, temperature=0.0)
    for bad, message in (
        (elsewhere, "took no private step with the engine"),
        (twice, "called make_private twice"),
        (in_workers, "num_workers=0"),
        (partial(train, z=0.0, factory=cold), "the run has no noise"),
    ):
        with pytest.raises(ValueError, match=message):
            one_run(bad, records(), num_canaries=100, delta=1e-5)

    def returns_nothing(dataset, engine):
        train(dataset, engine)

    with pytest.raises(TypeError, match="must return the trained model"):
        one_run(
            returns_nothing,
            records(),
            num_canaries=20,
            canaries=[records()[i] for i in range(20)],
            delta=1e-5,
        )
