"""What all kernels promise beside their law: charges, Pyro's contract, what leaves, refusals."""

import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC
from support.conjugate_chains import MAKERS, Gaussian, Tosses, counts, family, hmc, penalty
from support.pyro_models import (
    singular_where_made_up,
    slogdet_raises,
    with_and_without_a_record_that_fails,
)
from support.recorded import recorded_once

import torch_dpbayes as dpb
from torch_dpbayes.mcmc import ExponentialFamilyPenalty, exponential_family
from torch_dpbayes.mcmc import kernel as kernel_module
from torch_dpbayes.mcmc.kernel import Candidate

pytestmark = pytest.mark.usefixtures("double")
_recorded = recorded_once(kernel_module, exponential_family)


def run(kernel, *data, num_samples=2, warmup_steps=1, **options):
    runner = MCMC(kernel, num_samples, warmup_steps, disable_progbar=True, **options)
    runner.run(*(data or Gaussian().args))
    return runner


def test_no_noise_is_charged_as_not_private():
    kernel = family(Gaussian(), noise_multiplier=0)
    run(kernel)
    assert kernel.accountant.get_epsilon(1e-5) == math.inf
    with pytest.raises(dpb.PrivacyBudgetExceeded):
        run(family(Gaussian(), noise_multiplier=0, accountant=dpb.PrivacyAccountant(1.0, 1e-5)))


def test_a_budget_that_runs_out_keeps_the_samples():
    accountant = dpb.PrivacyAccountant(1.0, 1e-5)
    kernel = family(Gaussian(), noise_multiplier=30.0, accountant=accountant)
    with pytest.raises(dpb.PrivacyBudgetExceeded):
        run(kernel, num_samples=100_000, warmup_steps=5)
    afforded = counts(accountant)[30.0]
    assert kernel.get_samples()["mean"].shape == (afforded - 5, 1) and afforded > 20
    assert accountant.get_epsilon() <= 1.0


def test_runs_in_many_threads_are_made_one_after_another():
    """Pyro's runner is one effect for all threads, which it refuses to enter twice."""
    target, kernels = Gaussian(), [penalty(Gaussian()) for _ in range(3)]

    def chain(kernel):
        dpb.mcmc.MCMC(kernel, 20, 1, disable_progbar=True).run(*target.args)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(chain, kernels))
    assert [len(kernel.get_samples()["mean"]) for kernel in kernels] == [20] * 3
    assert [sum(counts(kernel.accountant).values()) for kernel in kernels] == [21] * 3


@pytest.mark.parametrize("name", MAKERS)
def test_a_kernel_in_pyros_runner(name):
    target, kernel = Tosses(), MAKERS[name](Tosses())
    runner = run(kernel, *target.args, num_samples=20, warmup_steps=5)
    # transformed one by one
    found = runner.get_samples()["rate"]
    torch.testing.assert_close(found, kernel.get_samples()["rate"], rtol=1e-14, atol=0)
    assert found.shape == (20,) and 0 < found.min() <= found.max() < 1
    kernel.setup(0, *target.args)
    # nothing exact leaves
    reports = {"acceptance rate", "divergences", "noisy log ratios"}
    assert set(kernel.diagnostics()) == reports | {"R-hat", "effective sample size"}
    assert set(kernel.logging()) == {"epsilon", "step size", "acc. rate"}
    state = kernel.__getstate__()
    of_data = {"_density", "_theta", "_prior", "_terms", "_gradient", "_sum", "_count", "_current"}
    assert not any(state[name] for name in of_data & set(state))
    kernel.cleanup()
    assert kernel._prior is None and kernel._density is None
    with pytest.raises(dpb.errors.DPBayesError):
        pickle.dumps(kernel)  # its accountant is in memory


def test_seeds_do_not_repeat_a_run():
    kernel, given, drawn = family(Tosses()), {"rate": torch.tensor(7.0)}, []
    for _ in range(2):
        pyro.set_rng_seed(1)
        kernel.initial_params = given
        kernel.setup(0, *Tosses.args)
        assert torch.equal(kernel.initial_params["rate"], given["rate"])
        params = kernel.initial_params
        for _ in range(5):
            params = kernel.sample(params)
        drawn += kernel.diagnostics()["noisy log ratios"]
    assert len(set(drawn)) == 10


def half_defined(y):
    """In a quarter of all points."""
    m, k = (pyro.sample(name, dist.Normal(0.0, 1.0)) for name in "mk")
    with pyro.plate("data", len(y)):
        pyro.factor("f", -((y - torch.sqrt(m) - torch.sqrt(k)) ** 2))


def test_a_chain_starts_only_where_the_model_can_be_evaluated():
    kernel = penalty(Gaussian(), noise_multiplier=1.0)
    kernel.model = half_defined
    for _ in range(3):
        kernel.setup(0, torch.randn(20))
        assert min(kernel.initial_params.values()) > 0
        kernel.cleanup()
    kernel.initial_params = {"m": torch.tensor(-1.0), "k": torch.tensor(1.0)}
    with pytest.raises(dpb.errors.ArgumentError):
        kernel.setup(0, torch.randn(20))
    kernel.initial_params = {"m": torch.tensor(0.1), "k": torch.tensor(0.1)}
    kernel.setup(0, torch.randn(20))
    params = kernel.initial_params
    for _ in range(50):
        params = kernel.sample(params)
        assert min(params.values()) > 0
    found = kernel.diagnostics()
    left = [k for k, ratio in enumerate(found["noisy log ratios"]) if math.isnan(ratio)]
    assert left and found["divergences"] == left
    with pytest.raises(dpb.errors.ArgumentError):
        kernel.sample({"m": torch.tensor(-2.0), "k": torch.tensor(1.0)})
    assert counts(kernel.accountant) == {1.0: 50}


@slogdet_raises
def test_where_no_gradients_can_be_computed_no_chain_starts():
    """Though one of the data's could be, as another's would not."""
    kernel = hmc(Gaussian())
    kernel.model = singular_where_made_up
    with pytest.raises(dpb.errors.ArgumentError) as caught:
        good, _ = with_and_without_a_record_that_fails()
        run(kernel, good, initial_params={"w": torch.tensor(-30.0)})
    assert caught.value.code == "pyro-start" and counts(kernel.accountant) == {}


@pytest.mark.parametrize("name, count", [("HMC", 0), ("penalty", 1), ("family", 0)])
def test_under_add_or_remove_next_to_no_records_are_like_any_number(name, count):
    kernel = MAKERS[name](Gaussian(), neighboring="add_or_remove_one")
    run(kernel, Gaussian().args[0][:count], num_samples=3)
    assert len(kernel.get_samples()["mean"]) == 3


# -- at the ends of floats -------------------------------------------------------------------------


class Several:
    total_multiplier = 1.0

    def together(self, *numbers):
        self.sent = numbers
        return numbers


def test_where_noise_cannot_hide_a_sum_nothing_is_accepted():
    """Neither a bound that overflows nor noise that is rounded to nothing, even to 0, lets
    the sum decide, or be read.
    """
    kernel = penalty(Gaussian())
    kernel.setup(0, *Gaussian().args)
    for kernel._multiplier in (1e-50, 0.4, 1.0, 1e20):
        for bound in (5e-324, 1e-320, 1e-31, 1e200, math.inf):
            for total in (-math.inf, -1e300, 0.0, bound, 1.0, 1e300, math.inf):
                there = Candidate(torch.zeros(1), 0.0, total, 0.0, bound, {})
                accepted, log_ratio = kernel._metropolis(there)
                assert not accepted and math.isnan(log_ratio)
    for kernel._multiplier in (1e-50, 1e300):
        there = Candidate(torch.zeros(1), 0.0, 9.0, 0.0, 1.0, {})
        assert math.isnan(kernel._metropolis(there)[1])
    kernel._owners, kernel._multiplier = Several(), 1.0
    for bound in (0.0, 5e-324, 1e200):  # nor does it leave an owner
        kernel._metropolis(Candidate(torch.zeros(1), 0.0, 1e300, 0.0, bound, {}))
        assert kernel._owners.sent == (0.0, 0.0, False)


def test_statistics_whose_parameters_hardly_move_do_not_show():
    """The norm of Δη is rounded to 0, Δη is not."""
    kernel = family(Gaussian(), noise_multiplier=1.0, proposal_scale=1.0)
    kernel._natural = lambda theta: 1e-170 * theta["mean"].expand(2)
    kernel._statistics = lambda x: torch.cat([x, x])
    kernel._normalizer = lambda theta: torch.zeros(())
    run(kernel, num_samples=20)
    assert set(kernel.diagnostics()["noisy log ratios"]) == {0.0}


class ToOne:
    event = dpb.accounting.events.NoOpDpEvent()

    def propose(self, params):
        return {"mean": torch.ones(())}, 0.0


def test_a_huge_public_part_of_the_ratio_does_not_round_away_the_noise():
    """It is a multiple of 16,384. The exact sum, 8,192, lies in the middle between two of them."""
    kernel = ExponentialFamilyPenalty(
        lambda: pyro.sample("mean", dist.Normal(0.0, 1.0)),
        sufficient_statistics=torch.atleast_1d,
        natural_parameters=lambda latents: latents["mean"][None],
        log_normalizer=lambda latents: 1e17 * latents["mean"],
        max_statistic_norm=10.0,
        noise_multiplier=1.0,
        proposal=ToOne(),
        accountant=dpb.PrivacyAccountant(neighboring="replace_one"),
    )
    start = {"mean": torch.zeros(())}
    run(kernel, torch.full((1000,), 8.192), num_samples=60, initial_params=start)
    assert len(set(kernel.diagnostics()["noisy log ratios"])) == 2


def test_noise_is_added_to_a_sum_before_it_is_rounded():
    torch.set_default_dtype(torch.float32)
    kernel = hmc(Gaussian(), max_grad_norm=1.0, grad_noise_multiplier=1.0)
    kernel.setup(0, torch.randn(9, 1))
    large = torch.tensor([2.0**24 + 0.75], dtype=torch.float64)
    kernel._density.clipped_gradient_sum = lambda theta, bound: large
    asked = []

    def three_quarters(size, dtype, **_):
        asked.append(dtype)
        return torch.full((size,), 0.75, dtype=dtype)

    kernel._noise.standard_normal = three_quarters
    # float32 holds even numbers only there
    zero = torch.zeros(1)
    slope = kernel._potential_gradient(kernel._noisy_sum(zero), zero)
    assert float(slope) == -(2.0**24 + 2) and asked == [torch.float64]


# -- the exponential family's data -----------------------------------------------------------------


def statistics(function, *data, count=None, **options):
    """Σ clip(s(x_i)) as the kernel holds it."""
    kernel = ExponentialFamilyPenalty(
        lambda: pyro.sample("mean", dist.Normal(0.0, 1.0)),
        sufficient_statistics=function,
        natural_parameters=lambda theta: theta["mean"].expand(2),
        log_normalizer=lambda theta: torch.zeros(()),
        **{"max_statistic_norm": 1e6, "noise_multiplier": 1.0, "proposal_scale": 1.0, **options},
        num_data=count,
        accountant=dpb.PrivacyAccountant(),
    )
    kernel.setup(0, *data)
    return kernel


def test_each_records_statistics_are_clipped_and_computed_alone(monkeypatch):
    x = torch.tensor([3.0, -0.1, math.nan, math.inf, 5e30])
    both = lambda x: torch.stack([x, torch.full_like(x, 2.0)])  # noqa: E731
    rows = torch.stack([torch.tensor([v, 2.0]) for v in (3.0, -0.1, 5e30)]).double()
    expected = (rows * (2.5 / rows.norm(dim=1, keepdim=True)).clamp(max=1.0)).sum(0)
    torch.testing.assert_close(statistics(both, x, max_statistic_norm=2.5)._sum, expected)
    # one that cannot be computed is nothing: 99 is out of range
    table = torch.tensor([0.5, 1.0, 2.0])
    kernel = statistics(
        lambda i: torch.stack([table[i], 0 * table[0]]), torch.tensor([0, 2, 99, 2])
    )
    torch.testing.assert_close(kernel._sum, torch.tensor([4.5, 0.0]))
    # nor is one that makes it fail
    kernel = statistics(lambda i: (6 // i).double().expand(2), torch.tensor([1, 0, 2]))
    torch.testing.assert_close(kernel._sum, torch.tensor([9.0, 9.0]))
    # a mean over the records is one over the record that the function is given; and in chunks
    monkeypatch.setattr("torch_dpbayes.density.record_density._ROWS_IF_PRIVATE", 7)
    x, calls = torch.randn(150), []

    def centred(x):
        calls.append(None)
        return torch.stack([x - x.mean(), x])

    kernel = statistics(centred, x)
    torch.testing.assert_close(kernel._sum, torch.stack([torch.zeros(()), x.sum()]))
    # the data are looked at once
    before, total = len(calls), kernel._sum.clone()
    x.fill_(math.nan)
    params = kernel.initial_params
    for _ in range(20):
        params = kernel.sample(params)
    assert len(calls) == before and torch.equal(kernel._sum, total)


# -- refusals --------------------------------------------------------------------------------------


def two(x):
    return torch.stack([x, x])


def started_twice():
    """Pyro sets the starts of all parallel chains on one kernel, one after another."""
    kernel = family(Gaussian())
    for row in (0, 1):
        kernel.initial_params = {"mean": torch.full((1,), float(row))}
    kernel.setup(0, *Gaussian().args)


KEPT = []
OF_CLIP_BOUNDS = (5e-324, 1e-31, 0.0, 1e151, math.inf)
X, BAD_MASS = torch.zeros(3), torch.tensor([[1.0, 2.0], [2.0, 1.0]])
ARGUMENTS = {  # values that a kernel does not take
    (penalty, "log_ratio_slope"): OF_CLIP_BOUNDS,
    (hmc, "log_ratio_slope"): OF_CLIP_BOUNDS,
    (hmc, "max_grad_norm"): OF_CLIP_BOUNDS,
    (family, "max_statistic_norm"): OF_CLIP_BOUNDS,
    (penalty, "noise_multiplier"): (-1.0, math.nan),
    (family, "noise_multiplier"): (-1.0, math.nan),
    (hmc, "ratio_noise_multiplier"): (-1.0,),
    (hmc, "grad_noise_multiplier"): (-1.0,),
    (penalty, "proposal_scale"): (0.0, None, torch.tensor([1.0, 0.0]), torch.ones(2, 2)),
    (family, "proposal_scale"): (0.0, None),
    (penalty, "proposal"): (object(),),
    (hmc, "num_steps"): (0,),
    (hmc, "mass_matrix"): (BAD_MASS, torch.tensor([-1.0])),
    (hmc, "jitter"): (True, -0.1, 1.5, math.nan, "0.2"),
    (family, "num_data"): (0, 2.5),
    **{(make, "accountant"): (None,) for make in MAKERS.values()},
    **{(make, "target_accept_prob"): (1.0,) for make in MAKERS.values()},
}
RUNS = {  # and runs that do not begin
    "no data": lambda: statistics(two),
    "other lengths": lambda: statistics(two, X, torch.zeros(4)),
    "no tensors": lambda: statistics(two, [1.0, 2.0]),
    "other parameters": lambda: statistics(lambda x: x, X),
    "numbers": lambda: statistics(lambda x: x.item(), X),
    "rows of records": lambda: statistics(lambda x: x[0], X),
    "a record that is kept": lambda: statistics(lambda x: two(KEPT.append(x) or x), X),
    "another number": lambda: run(family(Gaussian(), num_data=5)),
    "no gradients": lambda: torch.inference_mode()(run)(hmc(Gaussian())),
    "starts": started_twice,
    "Pyro's kernel": lambda: dpb.mcmc.MCMC(pyro.infer.NUTS(Gaussian.model), 3),
    "transforms": lambda: dpb.mcmc.MCMC(penalty(Gaussian()), 3, transforms={}),
    "a name": lambda: run(family(Gaussian()), save_params="mean"),
    "no latent's name": lambda: run(family(Gaussian()), save_params=["b"]),
}


def test_what_cannot_be_run_is_refused_before_a_charge(monkeypatch):
    monkeypatch.setattr(dpb.PrivacyAccountant, "compose", lambda *_, **__: pytest.fail("charged"))
    attempts = {
        (name, str(value)): partial(make, Gaussian(), **{name: value})
        for (make, name), values in ARGUMENTS.items()
        for value in values
    }
    for name, attempt in (attempts | RUNS).items():
        with pytest.raises(dpb.errors.DPBayesError):
            attempt()
            pytest.fail(f"accepted: {name}")
