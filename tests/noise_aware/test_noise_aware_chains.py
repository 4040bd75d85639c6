"""From a noise-aware posterior to a chain, on one accountant."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC

import torch_dpbayes as dpb
from torch_dpbayes.accounting.events import GaussianDpEvent
from torch_dpbayes.mcmc import DPHMC, DPPenalty


def model(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 4.0), obs=y)


def started(num_steps=None, epsilon=6.0, relation="replace_one"):
    y = 0.5 + 4 * torch.randn(3000)
    accountant = dpb.PrivacyAccountant(epsilon, 1e-5, neighboring=relation)
    posterior = dpb.noise_aware.laplace(
        model, y, epsilon=1.0, accountant=accountant, max_grad_norm=1.0, num_data=3000
    )
    of_hmc = {} if num_steps is None else {"num_steps": num_steps, "max_grad_norm": 1.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kernel = dpb.noise_aware.kernel_from(
            posterior,
            model,
            accountant=accountant,
            num_iterations=60,
            log_ratio_slope=1.0,
            **of_hmc,
        )
    return y, accountant, posterior, kernel


@pytest.mark.thorough
@pytest.mark.parametrize("num_steps, kind", [(None, DPPenalty), (2, DPHMC)])
def test_the_kernel_spends_what_is_left_and_no_more(num_steps, kind):
    y, accountant, _, kernel = started(num_steps)
    assert type(kernel) is kind and accountant.get_epsilon() <= 1.0
    runner = MCMC(kernel, num_samples=60, warmup_steps=0, disable_progbar=True)
    runner.run(y)
    assert 5.98 < accountant.get_epsilon() <= 6.0
    with pytest.raises(dpb.PrivacyBudgetExceeded):
        MCMC(kernel, num_samples=1, warmup_steps=0, disable_progbar=True).run(y)


def test_it_starts_at_draws_of_the_posterior():
    y, _, posterior, kernel = started()
    kernel.setup(0, y)
    start = float(kernel.initial_params["mean"])
    assert abs(start - float(posterior.mean["mean"])) < 8 * float(posterior.stddev["mean"])
    assert float(posterior.unconstrained_stddev[0]) == pytest.approx(
        float(posterior.stddev["mean"]), rel=0.25
    )


def test_a_chain_that_cannot_mix_is_named_before_it_is_paid():
    y = torch.randn(50)
    accountant = dpb.PrivacyAccountant(0.5, 1e-5, neighboring="replace_one")
    posterior = dpb.noise_aware.laplace(
        model, y, epsilon=0.2, accountant=accountant, max_grad_norm=1.0
    )
    charged = accountant.get_epsilon()
    with pytest.warns(UserWarning, match="cannot mix on such a posterior"):
        dpb.noise_aware.kernel_from(
            posterior, model, accountant=accountant, num_iterations=50, log_ratio_slope=10.0
        )
    assert accountant.get_epsilon() == charged
    # a run that leaves next to nothing: named, and not refused
    posterior = dpb.noise_aware.laplace(model, y, accountant=accountant, max_grad_norm=1.0)
    assert 0.499 < accountant.get_epsilon() < 0.5
    with pytest.warns(UserWarning, match="cannot mix on such a posterior"):
        dpb.noise_aware.kernel_from(
            posterior, model, accountant=accountant, num_iterations=50, log_ratio_slope=1.0
        )
    least = GaussianDpEvent(1e7)
    accountant.compose(least, accountant.remaining(least))
    with pytest.raises(ValueError, match="no noise multiplier"):
        dpb.noise_aware.kernel_from(
            posterior, model, accountant=accountant, num_iterations=50, log_ratio_slope=1.0
        )
    with pytest.raises(ValueError, match="make the accountant with epsilon and delta"):
        dpb.noise_aware.kernel_from(
            posterior,
            model,
            accountant=dpb.PrivacyAccountant(),
            num_iterations=50,
            log_ratio_slope=1.0,
        )
