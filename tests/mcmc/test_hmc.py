"""DPHMC: trajectories, kept gradients and their noise."""

import math

import pytest
import torch
from pyro.infer import MCMC
from scipy.stats import kstest, norm
from support.conjugate_chains import (
    LEVEL,
    ROWS,
    Gaussian,
    KeepsTheStartsGradient,
    Tosses,
    counts,
    gaussian,
    hmc,
    p_value,
)
from support.pyro_models import singular_where_made_up, with_and_without_a_record_that_fails

import torch_dpbayes as dpb
from torch_dpbayes.density import Prior
from torch_dpbayes.mcmc import DPHMC

pytestmark = pytest.mark.usefixtures("double")


def test_noise_is_added_to_a_sum_before_it_is_rounded():
    torch.set_default_dtype(torch.float32)
    settings = {"step_size": 0.1, "num_steps": 1, "log_ratio_slope": 1.0, "max_grad_norm": 1.0}
    kernel = DPHMC(
        gaussian,
        **settings,
        ratio_noise_multiplier=1.0,
        grad_noise_multiplier=1.0,
        accountant=dpb.PrivacyAccountant(),
    )
    kernel.setup(0, torch.randn(9, 1))
    kernel._density.clipped_gradient_sum = lambda theta, bound: torch.tensor(
        [2.0**24 + 0.75], dtype=torch.float64
    )
    kernel._noise.standard_normal = lambda size, dtype, device: torch.full(
        (size,), 0.75, dtype=dtype
    )
    # float32 holds even numbers only there
    zero = torch.zeros(1)
    slope = kernel._potential_gradient(kernel._noisy_sum(zero), zero)
    assert float(slope) == -(2.0**24 + 2)


@pytest.mark.slow
@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("target, steps", [(Gaussian, 20), (Tosses, 5), (Tosses, 20)])
def test_the_posterior_is_invariant_under_long_trajectories(target, steps, reuse):
    target = target()
    assert p_value(hmc(target, steps, reuse_gradients=reuse), target) > LEVEL


class KeepsTheWrongGradient(DPHMC):
    """After a rejection the gradient where the trajectory ended is kept."""

    def _noisy_sum(self, theta):
        self.last = super()._noisy_sum(theta)
        return self.last

    def _iterate(self, theta):
        moved, outcome = super()._iterate(theta)
        self._gradient = self.last
        return moved, outcome


def kept_gradients_are_right(kernel):
    """Whether each kept gradient was drawn where the chain stays, and each iteration drew
    ``num_steps`` others.
    """
    target, drawn, original = Gaussian(), {}, kernel._noisy_sum

    def noted(theta):
        gradient = original(theta)
        drawn[gradient] = theta.clone()  # tensors are keys by identity
        return gradient

    kernel._noisy_sum = noted

    kernel.setup(0, *target.args)
    params, accepted, right = target.draw(), set(), True
    for k in range(40):
        before, params = params, kernel.sample(params)
        accepted.add(torch.equal(before["mean"], params["mean"]))
        right &= (
            torch.equal(drawn[kernel._gradient], params["mean"]) and len(drawn) == 3 * (k + 1) + 1
        )
    assert accepted == {True, False}
    return right


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    "kernel, right",
    [(DPHMC, True), (KeepsTheWrongGradient, False), (KeepsTheStartsGradient, False)],
)
def test_the_kept_gradient_is_the_one_where_the_chain_stays(kernel, right):
    assert kept_gradients_are_right(hmc(Gaussian(), 3, kernel=kernel)) == right


def energy_errors(step_size, num_steps, monkeypatch):
    """Of noiseless trajectories of one duration."""
    kernel, found = (
        hmc(
            Gaussian(),
            num_steps,
            step_size=step_size,
            jitter=0,
            ratio_noise_multiplier=0,
            grad_noise_multiplier=0,
        ),
        [],
    )
    original = kernel._metropolis
    monkeypatch.setattr(
        kernel,
        "_metropolis",
        lambda ratio, rest, *noise: found.append(ratio + rest) or original(ratio, rest, *noise),
    )
    target = Gaussian()
    kernel.setup(0, *target.args)
    for _ in range(60):
        kernel.sample(target.draw())
    return float(torch.tensor(found).abs().mean())


@pytest.mark.slow
def test_the_leapfrog_keeps_the_energy_to_second_order(monkeypatch):
    coarse, fine = energy_errors(0.04, 5, monkeypatch), energy_errors(0.01, 20, monkeypatch)
    assert fine < 0.01 and 6 < coarse / fine < 40  # 16 but for which momenta were drawn


@pytest.mark.slow
def test_a_leapfrog_without_the_prior_does_not(monkeypatch):
    whole = Prior.log_density_and_gradient
    monkeypatch.setattr(
        Prior,
        "log_density_and_gradient",
        lambda prior, theta: (whole(prior, theta)[0], torch.zeros_like(theta)),
    )
    assert energy_errors(0.01, 20, monkeypatch) > 0.05


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("steps", [1, 4])
def test_k_iterations_are_k_ratios_and_kl_plus_1_gradients(steps, reuse):
    target = Gaussian()
    kernel = hmc(
        target, steps, ratio_noise_multiplier=7.0, grad_noise_multiplier=5.0, reuse_gradients=reuse
    )
    runner = MCMC(kernel, num_samples=6, warmup_steps=4, disable_progbar=True)
    assert counts(kernel.accountant) == {}
    runner.run(*target.args)
    gradients = 10 * steps + 1 if reuse else 10 * (steps + 1)
    assert counts(kernel.accountant) == {7.0: 10, 5.0: gradients}
    assert len(runner.diagnostics()["noisy log ratios"]["chain 0"]) == 10
    runner.run(*target.args)  # another chain begins with another gradient
    assert counts(kernel.accountant) == {7.0: 20, 5.0: 2 * gradients}


@pytest.mark.thorough
def test_gradient_noise_is_what_is_charged():
    target = Gaussian()
    kernel = hmc(target, 1)
    kernel.setup(0, *target.args)
    theta = torch.tensor([0.1])
    exact = float((ROWS[:, 0] - 0.1).sum())  # the prior's part is exact
    assert (
        kstest(
            [float(kernel._noisy_sum(theta)) for _ in range(1000)],
            norm(exact, 0.2 * target.slope).cdf,
        ).pvalue
        > LEVEL
    )


@pytest.mark.parametrize("jitter", [True, -0.1, 1.5, math.nan, "0.2"])
def test_jitter_is_a_share(jitter):
    with pytest.raises(ValueError, match="jitter is how far step sizes scatter"):
        hmc(Gaussian(), num_steps=1, jitter=jitter)


def test_inference_mode_is_named_where_gradients_are_missing():
    target, kernel = Gaussian(), hmc(Gaussian(), num_steps=1)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        MCMC(kernel, num_samples=2, warmup_steps=1, disable_progbar=True).run(*target.args)
    assert counts(kernel.accountant) == {}


@pytest.mark.thorough
def test_where_no_gradients_can_be_computed_no_chain_starts_whatever_the_records_are():
    messages = set()
    for data in with_and_without_a_record_that_fails():
        kernel = hmc(Gaussian(), num_steps=1)
        kernel.model = singular_where_made_up
        start = {"w": torch.tensor(-30.0)}
        runner = MCMC(
            kernel, num_samples=2, warmup_steps=0, initial_params=start, disable_progbar=True
        )
        with pytest.raises(ValueError, match="would start where") as caught:
            runner.run(data)
        messages.add(str(caught.value))
        assert counts(kernel.accountant) == {}
    assert len(messages) == 1
