"""What all kernels promise: their law, compared with closed forms of conjugate posteriors, their
charges, and Pyro's contract.
"""

import math
import pickle
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC
from pyro.infer.mcmc.api import StreamingMCMC
from scipy.stats import kstest, norm
from support.conjugate_chains import (
    LEVEL,
    PRIOR_STD,
    ROWS,
    Drift,
    Gaussian,
    KeepsTheStartsGradient,
    PenaltyWithoutPenalty,
    Tosses,
    WithoutPenalty,
    bernoulli_prior,
    counts,
    gaussian,
    gaussian_prior,
    hmc,
    much_noise,
    p_value,
    penalty,
    smallest,
    thinned_p_value,
)

import torch_dpbayes as dpb
from torch_dpbayes.density import clipped_ratio_sum
from torch_dpbayes.mcmc import DPHMC, DPPenalty, ExponentialFamilyPenalty

pytestmark = pytest.mark.usefixtures("double")


def family(target, kernel=ExponentialFamilyPenalty, neighboring="replace_one", **options):
    """The same two posteriors from sufficient statistics; a private number of records is
    noised as well.
    """
    if isinstance(target, Gaussian):
        functions = {
            "prior": partial(gaussian_prior, len(target.mean)),
            "sufficient_statistics": lambda x: x,
            "natural_parameters": lambda theta: theta["mean"],
            "log_normalizer": lambda theta: theta["mean"].square().sum() / 2,
            "max_statistic_norm": 20.0,
        }
        fitting = {"proposal_scale": 0.25, "noise_multiplier": 0.25}
    else:
        functions = {
            "prior": bernoulli_prior,
            "sufficient_statistics": lambda y: y,
            "natural_parameters": lambda theta: theta["rate"].logit(),
            "log_normalizer": lambda theta: -torch.log1p(-theta["rate"]),
            "max_statistic_norm": 1.0,
        }
        fitting = {"proposal_scale": 0.8, "noise_multiplier": 1.0}
    accountant = dpb.PrivacyAccountant(neighboring=neighboring)
    return kernel(
        **{**functions, **fitting, "accountant": accountant, "target_accept_prob": None, **options}
    )


def joint_p_values(kernel, target, draws=700, iterations=6):
    """Geweke (2004): parameters from the prior and data from the model, then by turns an iteration
    and new data. The result has to be distributed like the beginning: the parameters alone, and
    their place in the posterior given the data.
    """
    kernel.setup(0, *target.args)
    ends, places = [], []
    for _ in range(draws):
        params = target.draw_from_prior()
        for _ in range(iterations):
            target.renew_data(params)
            kernel._started = False  # what is remembered of the data has to be looked up again
            if isinstance(kernel, ExponentialFamilyPenalty):
                kernel._sum = target.args[0].sum(0).reshape(-1)
            params = kernel.sample(params)
        ends.append(params)
        places.append(target.uniforms([params]))
    together = [
        torch.cat([torch.as_tensor(u[k]) for u in places]).numpy() for k in range(len(places[0]))
    ]
    return smallest([*target.prior_uniforms(ends), *together])


FULL_MASS = torch.tensor([[2.0, 0.8], [0.8, 1.0]], dtype=torch.float64)


RIGHT = {
    "penalty, Gaussian": (Gaussian, penalty),
    "penalty, tosses": (Tosses, penalty),
    "penalty, much noise": (Gaussian, much_noise),
    "penalty, asymmetric proposal": (Gaussian, partial(penalty, proposal=Drift())),
    "penalty, correlated walk": (
        partial(Gaussian, 2),
        partial(
            penalty, proposal_scale=torch.tensor([[0.2, 0.0], [0.15, 0.1]], dtype=torch.float64)
        ),
    ),
    "family, Gaussian": (partial(Gaussian, 2), family),
    "family, tosses": (Tosses, family),
    "family, private number of records": (
        Tosses,
        partial(family, neighboring="add_or_remove_one", noise_multiplier=0.5),
    ),
    **{
        f"HMC, {name}, L={steps}, {'with' if reuse else 'without'} reuse": (
            target,
            partial(hmc, num_steps=steps, reuse_gradients=reuse),
        )
        for name, target in [("Gaussian", Gaussian), ("tosses", Tosses)]
        for steps in (1, 5)
        for reuse in (True, False)
        if target is Gaussian or steps == 1
    },
    "HMC, full mass matrix": (
        partial(Gaussian, 2),
        partial(hmc, num_steps=2, mass_matrix=FULL_MASS, step_size=0.12),
    ),
    "HMC, diagonal mass matrix": (
        partial(Gaussian, 2),
        partial(hmc, num_steps=2, mass_matrix=FULL_MASS.diagonal(), step_size=0.12),
    ),
    "HMC, no jitter": (Gaussian, partial(hmc, num_steps=2, jitter=0, step_size=0.1)),
}


# one of each kernel before each change; all of them with -m slow
FAST = {"penalty, Gaussian", "family, tosses", "HMC, Gaussian, L=5, with reuse"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow) if case not in FAST else case for case in RIGHT],
)
def test_the_posterior_is_invariant(case):
    make_target, make_kernel = RIGHT[case]
    target = make_target()
    assert p_value(make_kernel(target), target) > LEVEL


JOINT = {
    "penalty": (Gaussian, penalty),
    "family": (Tosses, family),
    "family, private number of records": (
        Tosses,
        partial(family, neighboring="add_or_remove_one", noise_multiplier=0.5),
    ),
    "HMC": (Gaussian, partial(hmc, num_steps=3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", JOINT)
def test_parameters_and_data_together_are_invariant(case):
    make_target, make_kernel = JOINT[case]
    target = make_target()
    assert joint_p_values(make_kernel(target), target) > LEVEL


class HMCWithoutPenalty(WithoutPenalty, DPHMC):
    pass


class FamilyWithoutPenalty(WithoutPenalty, ExponentialFamilyPenalty):
    pass


class IgnoresTheProposalRatio(Drift):
    def propose(self, params):
        return super().propose(params)[0], 0.0


BROKEN = {
    "penalty without σ²/2": (Gaussian, partial(much_noise, kernel=PenaltyWithoutPenalty)),
    "penalty ignores the proposal's ratio": (
        Gaussian,
        partial(penalty, proposal=IgnoresTheProposalRatio()),
    ),
    "HMC without σ²/2": (
        Gaussian,
        partial(
            hmc, num_steps=2, kernel=HMCWithoutPenalty, ratio_noise_multiplier=0.8, step_size=0.35
        ),
    ),
    "family without σ²/2": (
        Gaussian,
        partial(family, kernel=FamilyWithoutPenalty, noise_multiplier=0.5, proposal_scale=0.4),
    ),
    "HMC keeps the start's gradient": (
        Gaussian,
        partial(
            hmc,
            num_steps=1,
            kernel=KeepsTheStartsGradient,
            step_size=0.25,
            jitter=0,
            ratio_noise_multiplier=0.02,
            grad_noise_multiplier=0.02,
        ),
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    [
        case if case == "penalty without σ²/2" else pytest.param(case, marks=pytest.mark.slow)
        for case in BROKEN
    ],
)
def test_a_broken_kernel_fails_the_same_test(case):
    make_target, make_kernel = BROKEN[case]
    target = make_target()
    assert (
        p_value(make_kernel(target), target, draws=700 if "HMC" in case else 1000, iterations=8)
        < LEVEL
    )


@pytest.mark.parametrize(
    "make",
    [
        partial(much_noise, kernel=PenaltyWithoutPenalty),
        partial(family, kernel=FamilyWithoutPenalty, noise_multiplier=0.5),
    ],
)
@pytest.mark.slow
def test_a_broken_kernel_fails_geweke_s_test(make):
    target = Gaussian()
    assert joint_p_values(make(target), target, draws=1000, iterations=8) < LEVEL


CHAINS = {
    "penalty": penalty,
    "family": family,
    **{
        f"HMC, L={steps}, {'with' if reuse else 'without'} reuse": partial(
            hmc, num_steps=steps, reuse_gradients=reuse
        )
        for steps in (1, 5, 20)
        for reuse in (True, False)
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CHAINS)
@pytest.mark.parametrize("target", [Gaussian, Tosses])
def test_a_whole_chain_has_the_posterior(case, target):
    target = target()
    draws = 6000 if "L=20" in case else 4000 if "L=5" in case else 8000
    assert thinned_p_value(CHAINS[case](target), target, draws) > LEVEL


def test_no_noise_is_charged_as_not_private():
    target = Gaussian()
    kernel = penalty(target, noise_multiplier=0)
    MCMC(kernel, num_samples=2, warmup_steps=1, disable_progbar=True).run(*target.args)
    assert kernel.accountant.get_epsilon(1e-5) == math.inf
    kernel = penalty(target, noise_multiplier=0, accountant=dpb.PrivacyAccountant(1.0, 1e-5))
    with pytest.raises(dpb.PrivacyBudgetExceeded):
        MCMC(kernel, num_samples=2, warmup_steps=1, disable_progbar=True).run(*target.args)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    "make",
    [
        partial(penalty, noise_multiplier=30.0),
        partial(hmc, num_steps=3, ratio_noise_multiplier=30.0, grad_noise_multiplier=60.0),
    ],
)
def test_a_budget_that_runs_out_keeps_the_samples(make):
    target = Gaussian()
    accountant = dpb.PrivacyAccountant(1.0, 1e-5)
    kernel = make(target, accountant=accountant)
    with pytest.raises(dpb.PrivacyBudgetExceeded):
        MCMC(kernel, num_samples=100_000, warmup_steps=5, disable_progbar=True).run(*target.args)
    afforded = counts(accountant)[30.0]
    assert kernel.get_samples()["mean"].shape == (afforded - 5, 1) and afforded > 20
    assert accountant.get_epsilon() <= 1.0


def test_an_interrupted_chain_keeps_the_samples(monkeypatch):
    target = Gaussian()
    kernel, iterate = penalty(target), DPPenalty._iterate
    monkeypatch.setattr(
        DPPenalty,
        "_iterate",
        lambda self, theta: ctrl_c() if self._iteration == 30 else iterate(self, theta),
    )

    def ctrl_c():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        MCMC(kernel, num_samples=50, warmup_steps=10, disable_progbar=True).run(*target.args)
    assert kernel.get_samples()["mean"].shape == (20, 1)
    assert counts(kernel.accountant) == {0.25: 30}


# -- Pyro's contract -------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("make", [penalty, partial(hmc, num_steps=2)], ids=["penalty", "HMC"])
def test_pyros_runners_and_reports_work(make, capsys):
    target = Tosses()
    runner = MCMC(make(target), num_samples=50, warmup_steps=5, disable_progbar=True)
    runner.run(*target.args)
    assert runner.get_samples()["rate"].shape == (50,) and runner.get_samples()["rate"].min() > 0
    # transformed one by one
    torch.testing.assert_close(
        runner.get_samples()["rate"], runner.kernel.get_samples()["rate"], rtol=1e-14, atol=0
    )
    runner.summary()
    assert "rate" in capsys.readouterr().out
    streaming = StreamingMCMC(make(target), num_samples=20, warmup_steps=5, disable_progbar=True)
    streaming.run(*target.args)
    assert streaming.get_statistics()


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("make", [penalty, partial(hmc, num_steps=2)], ids=["penalty", "HMC"])
def test_a_chain_starts_where_it_is_told_and_seeds_do_not_repeat_it(make):
    target, start = Gaussian(), {"mean": torch.tensor([7.0])}
    drawn = []
    for _ in range(2):
        pyro.set_rng_seed(1)
        kernel = make(target)
        kernel.initial_params = start
        kernel.setup(0, *target.args)
        assert torch.equal(kernel.initial_params["mean"], start["mean"])
        for _ in range(5):
            kernel.sample(kernel.initial_params)
        drawn.append(kernel.diagnostics()["noisy log ratios"])
    assert len({*drawn[0], *drawn[1]}) == 10


@pytest.mark.slow
def test_starts_come_from_the_prior():
    starts = []
    for _ in range(60):
        kernel = penalty(Gaussian())
        kernel.setup(0, torch.full((20, 1), 1e6))
        starts.append(float(kernel.initial_params["mean"]))
    assert kstest(starts, norm(0, PRIOR_STD).cdf).pvalue > LEVEL


def half_defined(y):
    m = pyro.sample("m", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.factor("f", -((y - torch.sqrt(m)) ** 2))


@pytest.mark.thorough
def test_a_chain_starts_only_where_the_model_can_be_evaluated():
    kernel = DPPenalty(
        half_defined,
        proposal_scale=1.0,
        log_ratio_slope=1.0,
        noise_multiplier=1.0,
        accountant=dpb.PrivacyAccountant(),
    )
    for _ in range(10):
        kernel.setup(0, torch.randn(20))
        assert kernel.initial_params["m"] > 0
        kernel.cleanup()
    kernel.initial_params = {"m": torch.tensor(-1.0)}
    with pytest.raises(ValueError, match="cannot be evaluated"):
        kernel.setup(0, torch.randn(20))
    kernel.initial_params = {"m": torch.tensor(1.0)}
    kernel.setup(0, torch.randn(20))
    params = kernel.initial_params
    for _ in range(50):
        params = kernel.sample(params)
        assert params["m"] > 0
    assert len(kernel.diagnostics()["divergences"]) == sum(
        map(math.isnan, kernel.diagnostics()["noisy log ratios"])
    )
    with pytest.raises(ValueError, match="cannot be evaluated"):
        kernel.sample({"m": torch.tensor(-2.0)})
    assert counts(kernel.accountant) == {1.0: 50}


@pytest.mark.parametrize("make", [penalty, partial(hmc, num_steps=2)], ids=["penalty", "HMC"])
def test_nothing_exact_leaves_a_kernel(make):
    target = Gaussian()
    kernel = make(target)
    kernel.setup(0, *target.args)
    params = kernel.initial_params
    for _ in range(10):
        params = kernel.sample(params)
    assert set(kernel.logging()) == {"step size", "acc. rate", "epsilon"}
    assert set(kernel.diagnostics()) == {
        *("acceptance rate", "divergences", "noisy log ratios"),
        *("R-hat", "effective sample size"),
    }
    state = kernel.__getstate__()
    assert all(state[name] is None for name in ("_density", "_terms", "_theta", "_prior"))
    kernel.cleanup()
    assert kernel._density is None and kernel._terms is None


@pytest.mark.slow
def test_warm_up_reaches_the_acceptance_rate_it_aims_at():
    target = Gaussian()
    kernel = penalty(target, proposal_scale=0.001, noise_multiplier=0.1, target_accept_prob=0.3)
    MCMC(kernel, num_samples=1000, warmup_steps=1500, disable_progbar=True).run(*target.args)
    draws = kernel.get_samples()["mean"][:, 0]
    assert 0.15 < float((draws[1:] != draws[:-1]).double().mean()) < 0.45


@pytest.mark.parametrize(
    "make, options, message",
    [
        (penalty, {"noise_multiplier": -1.0}, "noise_multiplier"),
        (penalty, {"noise_multiplier": math.nan}, "noise_multiplier"),
        (penalty, {"log_ratio_slope": 0.0}, "log_ratio_slope"),
        (penalty, {"proposal_scale": 0.0}, "proposal_scale"),
        (penalty, {"proposal_scale": None}, "proposal_scale"),
        (penalty, {"proposal_scale": torch.tensor([1.0, 0.0])}, "positive"),
        (penalty, {"proposal_scale": torch.ones(2, 2)}, "Cholesky"),
        (penalty, {"accountant": None}, "accountant"),
        (penalty, {"proposal": object()}, "event"),
        (partial(hmc, num_steps=0), {}, "num_steps"),
        (partial(hmc, num_steps=1), {"max_grad_norm": math.inf}, "max_grad_norm"),
        (partial(hmc, num_steps=1), {"grad_noise_multiplier": -1.0}, "grad_noise_multiplier"),
        (
            partial(hmc, num_steps=1),
            {"mass_matrix": torch.tensor([[1.0, 2.0], [2.0, 1.0]])},
            "positive definite",
        ),
        (partial(hmc, num_steps=1), {"mass_matrix": torch.tensor([-1.0])}, "positive"),
        (partial(hmc, num_steps=1), {"target_accept_prob": 1.0}, "target_accept_prob"),
    ],
)
def test_arguments_out_of_range_are_refused(make, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make(Gaussian(), **options)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    "make, options",
    [
        (penalty, {"proposal_scale": torch.ones(3)}),
        (partial(hmc, num_steps=1), {"mass_matrix": torch.ones(3)}),
    ],
)
def test_what_has_another_dimension_than_the_model_is_refused(make, options):
    target = Gaussian()
    kernel = make(target, **options)
    with pytest.raises(ValueError, match="is for 3 coordinates, records read 1"):
        MCMC(kernel, num_samples=1, disable_progbar=True).run(*target.args)
    assert counts(kernel.accountant) == {}


def unplated_observation(x):
    gaussian(x)
    pyro.sample("total", dist.Normal(0.0, 1.0), obs=x.sum())


@pytest.mark.parametrize("make", [penalty, partial(hmc, num_steps=1)], ids=["penalty", "HMC"])
def test_bad_models_are_refused_before_a_charge(make):
    target = Gaussian()
    target.model = unplated_observation
    kernel = make(target)
    with pytest.raises(ValueError, match="'total' is observed outside the plate"):
        MCMC(kernel, num_samples=1, disable_progbar=True).run(*target.args)
    assert counts(kernel.accountant) == {}


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    "make", [penalty, partial(hmc, num_steps=2), family], ids=["penalty", "HMC", "family"]
)
def test_a_record_that_is_not_a_number_neither_stops_a_chain_nor_moves_it(make):
    """With it and without it the noisy ratios of the same proposals have the same law; here
    the noise is 0.
    """
    target = Gaussian()
    options = (
        {"ratio_noise_multiplier": 0.0, "grad_noise_multiplier": 0.0}
        if make not in (penalty, family)
        else {"noise_multiplier": 0.0}
    )
    if make is family:
        options["num_data"] = len(ROWS)
        options["neighboring"] = "add_or_remove_one"
    spoilt = torch.cat([target.args[0], torch.full((1, 1), math.nan)])
    totals = []
    for data in (target.args[0], spoilt):
        kernel = make(target, **options)
        kernel.setup(0, data)
        generator = torch.Generator().manual_seed(7)
        kernel._gaussian = lambda size, stream=generator, **_: torch.randn(size, generator=stream)
        kernel._standard_normal = lambda stream=generator, **_: float(
            torch.randn(1, generator=stream)
        )
        params = {"mean": torch.tensor([0.3])}
        for _ in range(10):
            params = kernel.sample(params)
        totals.append(torch.tensor(kernel.diagnostics()["noisy log ratios"]))
    torch.testing.assert_close(*totals)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("make", [penalty, partial(hmc, num_steps=2), family])
def test_under_add_or_remove_next_to_no_records_are_like_any_number(make, count):
    target = Gaussian()
    kernel = make(target, accountant=dpb.PrivacyAccountant(neighboring="add_or_remove_one"))
    MCMC(kernel, num_samples=3, warmup_steps=0, disable_progbar=True).run(target.args[0][:count])
    assert len(kernel.get_samples()["mean"]) == 3


@pytest.mark.parametrize("make", [penalty, partial(hmc, num_steps=2)])
def test_under_add_or_remove_tensors_are_data_whatever_their_length(make):
    def model(x, location):
        mean = pyro.sample("mean", dist.Normal(location, 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x)

    texts = set()
    for count in (0, 2, 3, 30):
        kernel = make(Gaussian())
        kernel.model = model
        with pytest.raises(ValueError, match=r"functools\.partial") as caught:
            kernel.setup(0, torch.randn(count, 3), torch.zeros(3))
        texts.add(str(caught.value))
    assert len(texts) == 1


def test_a_kernel_with_an_accountant_in_memory_cannot_travel_to_a_worker():
    with pytest.raises(Exception, match=r"path=|another process"):
        pickle.dumps(penalty(Gaussian()))


@pytest.fixture(scope="module")
def kernel_at_a_point():
    target = Gaussian()
    kernel = penalty(target)
    MCMC(kernel, num_samples=1, warmup_steps=1, disable_progbar=True).run(*target.args)
    return kernel


@pytest.mark.parametrize("multiplier", [1e-50, 0.4, 1.0, 1e20])
@pytest.mark.parametrize("bound", [5e-324, 1e-320, 1e-31, 1e200, math.inf])
def test_where_noise_cannot_hide_a_sum_nothing_is_accepted(bound, multiplier, kernel_at_a_point):
    """Neither a bound that overflows nor noise that is rounded to nothing, even to 0, lets
    the sum decide, or be read.
    """
    for total in (-math.inf, -1e300, 0.0, bound, 1.0, 1e300, math.inf):
        outcome = kernel_at_a_point._metropolis(total, 0.0, bound, multiplier)
        assert not outcome.accepted and math.isnan(outcome.log_ratio)


BOUNDS = [
    (penalty, "log_ratio_slope"),
    *((partial(hmc, num_steps=1), name) for name in ("log_ratio_slope", "max_grad_norm")),
]


@pytest.mark.parametrize("make, name", [*BOUNDS, (family, "max_statistic_norm")])
@pytest.mark.parametrize("value", [5e-324, 1e-31, 1e151, 1e307])
def test_clip_bounds_at_the_ends_of_floats_are_refused(make, name, value):
    with pytest.raises(ValueError, match=f"{name} = .* 1e-30 and 1e150"):
        make(Gaussian(), **{name: value})


def test_statistics_whose_parameters_hardly_move_do_not_show():
    """The norm of Δη is rounded to 0, Δη is not."""
    kernel = ExponentialFamilyPenalty(
        lambda: pyro.sample("mean", dist.Normal(0.0, 1.0)),
        sufficient_statistics=lambda x: torch.stack([x, x]),
        natural_parameters=lambda theta: 1e-170 * theta["mean"].expand(2),
        log_normalizer=lambda theta: torch.zeros(()),
        max_statistic_norm=10.0,
        noise_multiplier=1.0,
        proposal_scale=1.0,
        accountant=dpb.PrivacyAccountant(neighboring="replace_one"),
    )
    runner = MCMC(kernel, num_samples=20, warmup_steps=0, disable_progbar=True)
    runner.run(torch.linspace(1.0, 3.0, 20))
    assert set(runner.diagnostics()["noisy log ratios"]["chain 0"]) == {0.0}


def test_ratios_are_clipped_at_the_bound_itself():
    bound = 1.005  # which bfloat16 rounds to 1.0078
    sums = clipped_ratio_sum(
        torch.zeros(3, dtype=torch.bfloat16),
        torch.tensor([9.0, 9.0, 9.0], dtype=torch.bfloat16),
        bound,
    )
    assert sums == pytest.approx(3 * bound, rel=1e-12)
