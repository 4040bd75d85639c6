"""The whole history of an account, audited as one release."""

from functools import partial

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.accounting.events import GaussianDpEvent
from torch_dpbayes.accounting.gdp import gaussian_epsilon
from torch_dpbayes.audit import History
from torch_dpbayes.audit.bounds import Guesses, mu_lower_bound

DELTA = 1e-5


def fresh():
    return np.random.default_rng(torch.randint(2**62, ()).item())


def records(number=30):
    return TensorDataset(torch.randn(number, 8), torch.randint(0, 3, (number,)))


def train(dataset, engine, z=1.5, factory=None):
    """Two full batches."""
    net = nn.Sequential(nn.Linear(8, 200), nn.Tanh(), nn.Linear(200, 3))
    net, opt, loader = engine.make_private(
        module=net,
        optimizer=factory or partial(dpb.optim.DPSGLD, lr=0.01, temperature=1e-8),
        data_loader=DataLoader(dataset, batch_size=len(dataset)),
        max_grad_norm=1.0,
        noise_multiplier=z,
    )
    for _ in range(2):
        for x, y in loader:
            nn.functional.cross_entropy(net(x), y).backward()
            opt.step()
    return net


def gaussian_history(rng, mus, number, **options):
    """An account of Gaussian releases, and their scores."""
    accountant = dpb.PrivacyAccountant(delta=DELTA, epsilon=50.0)
    history = History(accountant, num_canaries=number, seed=int(rng.integers(2**62)), **options)
    for mu in mus:
        accountant.compose(GaussianDpEvent(1 / mu))
        history.add(rng.normal(size=number) + mu * history.coins, separation=mu)
    return history


def test_bounds_of_gaussian_compositions_are_valid():
    """μ's of three releases, whose composition is the Gaussian of their root of squares: of 1,000
    repeats at 95 %, at most 87 too high, as 88 are seen once in 10⁷ tries.
    """
    rng, number, made, mus = fresh(), 400, 100, np.array([0.3, 0.8, 0.5])
    coins = rng.random((1000, number)) < 0.5
    seen = rng.normal(size=(3, 1000, number)) + mus[:, None, None] * coins
    total = np.tensordot(mus, seen, axes=1)
    order = np.argsort(total, axis=1)
    right = np.take_along_axis(coins, order[:, -made // 2 :], 1).sum(1)
    right += (~np.take_along_axis(coins, order[:, : made // 2], 1)).sum(1)
    truth = np.sqrt(np.square(mus).sum())
    bounds = {v: mu_lower_bound(Guesses(number, made, v)) for v in set(right.tolist())}
    assert sum(bounds[v] > truth for v in right.tolist()) <= 87
    # all three together show more than the best of them, which alone shows no more than itself
    assert np.median([bounds[v] for v in right.tolist()]) > 0.5 * truth


def test_the_sum_is_the_likelihood_ratio_of_everything():
    """Its guesses are those of the exact posterior of the coins."""
    rng = fresh()
    history = gaussian_history(rng, [0.4, 1.2], 50)
    kept = history._scores
    seen = rng.normal(size=50)
    history.add(stats.norm.logpdf(seen, 0.7) - stats.norm.logpdf(seen), threat="one more")
    again = gaussian_history(fresh(), [1.0], 50)
    again._scores = np.array(kept)
    again.add(seen, separation=0.7)
    assert np.allclose(history._scores, again._scores)


@pytest.mark.parametrize("bound, share", [("gaussian", 0.2), ("independent", 0.6)])
def test_a_sound_history_is_not_refuted_and_shows_much(bound, share):
    """At 1 − 10⁻⁷: five standard deviations of the number of right guesses are allowed for."""
    result = gaussian_history(
        fresh(), [0.9, 0.9, 0.9], 4000, bound=bound, confidence=1 - 1e-7
    ).result()
    stated = gaussian_epsilon(0.9 * 3**0.5, DELTA)
    assert result.epsilon == pytest.approx(stated, rel=1e-3)
    assert share * stated < result.epsilon_lower_bound < stated
    assert not result.is_refuted and "3 releases on one account" in result.threat


def test_what_each_release_hides_the_history_shows():
    """Nine releases of which three are charged: μ is √3 times too large, and none of them alone
    is worth what is stated for all.
    """
    rng, number, mu = fresh(), 20_000, 0.4
    accountant = dpb.PrivacyAccountant(delta=DELTA)
    history = History(accountant, num_canaries=number, bound="independent", confidence=1 - 1e-7)
    alone = History(accountant, num_canaries=number, bound="independent", confidence=1 - 1e-7)
    accountant.compose(GaussianDpEvent(1 / mu), 3)
    alone.add(rng.normal(size=number) + mu * alone.coins, separation=mu)
    for _ in range(9):
        history.add(rng.normal(size=number) + mu * history.coins, separation=mu)
    assert not alone.result().is_refuted
    # 9·μ² against 3·μ²: 64 against 57 % right, of which 20,000 guesses tell 0.35 % apart
    assert special.ndtr(mu * 3 / 2) - special.ndtr(mu * 3**0.5 / 2) > 0.08
    assert history.result().is_refuted


def test_two_trainings_and_another_release_on_one_ledger(tmp_path):
    """All three show the same canaries. What a ledger states for several jobs is its budget, of
    which this history uses four fifths.
    """
    truth = gaussian_epsilon((4 / 1.5**2 + 0.25) ** 0.5, DELTA)
    options = {"epsilon": 1.25 * truth, "delta": DELTA, "path": tmp_path / "ledger.db"}
    accountant = dpb.PrivacyAccountant(**options)
    number = 1000
    history = History(accountant, num_canaries=number, confidence=1 - 1e-7)
    first = history.train(train, records())
    assert isinstance(first, nn.Module)
    one_job = accountant.get_epsilon(DELTA)
    # another process' job on the same file
    history.train(
        partial(train, factory=partial(dpb.optim.DPSGHMC, lr=0.01, temperature=1e-8)), records()
    )
    other = dpb.PrivacyAccountant(**options)
    other.compose(GaussianDpEvent(2.0), label="counts")
    counts = fresh().normal(size=number) + history.coins / 2.0
    history.add(counts, separation=0.5, threat="noisy counts")
    result = history.result()
    assert result.epsilon == 1.25 * truth and one_job < 0.9 * truth
    assert result.epsilon / 15 < result.epsilon_lower_bound < result.epsilon
    assert not result.is_refuted
    assert "3 releases" in result.threat and "noisy counts" in result.threat


def test_coins_are_a_copy():
    history = History(dpb.PrivacyAccountant(delta=DELTA, epsilon=1.0), num_canaries=500)
    before = history.coins
    history.coins[:] = True
    assert (history.coins == before).all() and 100 < before.sum() < 400


def test_what_makes_no_history_is_refused():
    accountant = dpb.PrivacyAccountant()
    with pytest.raises(ValueError, match="pass delta=1e-5"):
        History(accountant, num_canaries=500)
    with pytest.raises(ValueError, match="4 canaries give no lower bound"):
        History(accountant, num_canaries=4, delta=DELTA)
    history = History(accountant, num_canaries=100, delta=DELTA)
    with pytest.raises(ValueError, match="call train or add before result"):
        history.result()
    with pytest.raises(ValueError, match=r"one for each of 100 canaries, got shape \(3,\)"):
        history.add([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="not finite"):
        history.add([np.inf] * 100)
    with pytest.raises(ValueError, match="a positive number; got 0"):
        history.add([1.0] * 100, separation=0)

    def made_but_never_stepped(dataset, engine):
        accountant.compose(GaussianDpEvent(2.0))
        engine.make_private(
            module=nn.Linear(8, 100),
            optimizer=partial(dpb.optim.DPSGLD, lr=0.01),
            data_loader=DataLoader(dataset, batch_size=4),
            max_grad_norm=1.0,
        )

    with pytest.raises(ValueError, match=r"call opt\.step"):
        history.train(made_but_never_stepped, records())
    history.add([1.0] * 100)
    history.result()
    for again in (history.result, partial(history.add, [1.0] * 100)):
        with pytest.raises(ValueError, match="has been priced"):
            again()
