"""Conjugate models with their posteriors in closed form, and kernels for them. No clip bound here
can be reached.
"""

import math
from functools import partial

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC
from pyro.ops.stats import effective_sample_size
from scipy.stats import beta, kstest, norm

import torch_dpbayes as dpb
from torch_dpbayes.accounting import events
from torch_dpbayes.mcmc import DPHMC, DPPenalty

# about two hundred p-values: together they fail a right kernel once in a million runs
LEVEL = 1e-6 / 200


# -- two conjugate models; no clip bound below can be reached --------------------------------------

PRIOR_STD, ROWS = (
    0.3,
    torch.linspace(-1.0, 2.0, 20, dtype=torch.float64)[:, None]
    + torch.tensor([[0.0, 0.5]], dtype=torch.float64),
)


TOSSES = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 1, 0], dtype=torch.float64)


def gaussian_prior(dimension):
    return pyro.sample("mean", dist.Normal(0.0, PRIOR_STD).expand([dimension]).to_event(1))


def bernoulli_prior():
    return pyro.sample("rate", dist.Beta(2.0, 3.0))


def gaussian(x):
    mean = gaussian_prior(x.shape[1])
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x)


def bernoulli(y):
    rate = bernoulli_prior()
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(rate), obs=y)


class Gaussian:
    model, slope = staticmethod(gaussian), 20.0

    def __init__(self, columns=1):
        self.args = (ROWS[:, :columns].clone(),)
        self.precision = PRIOR_STD**-2 + len(ROWS)
        self.mean = self.args[0].sum(0) / self.precision

    def draw(self):
        return {"mean": self.mean + torch.randn(len(self.mean)) / self.precision**0.5}

    def draw_from_prior(self):
        return {"mean": PRIOR_STD * torch.randn(len(self.mean))}

    def renew_data(self, params):
        self.args[0].copy_(params["mean"] + torch.randn(self.args[0].shape))
        self.mean = self.args[0].sum(0) / self.precision

    def prior_uniforms(self, params):
        return [norm.cdf(torch.stack([p["mean"] for p in params])[:, 0] / PRIOR_STD)]

    def uniforms(self, params):
        """For exact draws of the posterior: independent uniforms, and the same for a
        direction across the coordinates.
        """
        z = (torch.stack([p["mean"] for p in params]) - self.mean) * self.precision**0.5
        return [
            norm.cdf(z[:, 0]),
            *(
                [norm.cdf(z[:, 1]), norm.cdf((z[:, 0] + z[:, 1]) / 2**0.5)]
                if z.shape[1] == 2
                else []
            ),
        ]


class Tosses:
    model, slope = staticmethod(bernoulli), 2.0

    def __init__(self):
        self.args = (TOSSES.clone(),)

    @property
    def posterior(self):
        heads = float(self.args[0].sum())
        return 2 + heads, 3 + len(TOSSES) - heads

    def draw(self):
        return {"rate": dist.Beta(*self.posterior).sample().logit()}

    def draw_from_prior(self):
        return {"rate": dist.Beta(2.0, 3.0).sample().logit()}

    def renew_data(self, params):
        self.args[0].copy_(torch.bernoulli(params["rate"].sigmoid().expand(len(TOSSES))))

    def uniforms(self, params):
        return [beta(*self.posterior).cdf(torch.stack([p["rate"] for p in params]).sigmoid())]

    def prior_uniforms(self, params):
        return [beta(2, 3).cdf(torch.stack([p["rate"] for p in params]).sigmoid())]


class Drift:
    """A random walk that prefers one direction."""

    event = events.NoOpDpEvent()

    def propose(self, params):
        moved = params["mean"] + 0.1 + 0.2 * torch.randn(1)
        back, forth = params["mean"] - moved - 0.1, moved - params["mean"] - 0.1
        return {"mean": moved}, float((forth**2 - back**2) / (2 * 0.2**2))


def penalty(target, kernel=DPPenalty, **options):
    fitting = (
        {"proposal_scale": 0.25, "noise_multiplier": 0.25}
        if isinstance(target, Gaussian)
        else {"proposal_scale": 0.8, "noise_multiplier": 0.8}
    )
    if "proposal" in options:
        del fitting["proposal_scale"]
    return kernel(
        target.model,
        **{
            **fitting,
            "log_ratio_slope": target.slope,
            "accountant": dpb.PrivacyAccountant(),
            "target_accept_prob": None,
            **options,
        },
    )


def hmc(target, num_steps, kernel=DPHMC, **options):
    if isinstance(target, Gaussian):
        fitting = {
            "step_size": 0.15 / max(num_steps, 1) ** 0.5,
            "ratio_noise_multiplier": 0.25,
            "grad_noise_multiplier": 0.2,
        }
    else:
        fitting = {
            "step_size": 0.6 / max(num_steps, 1) ** 0.5,
            "ratio_noise_multiplier": 0.8,
            "grad_noise_multiplier": 0.8,
        }
    settings = {
        "log_ratio_slope": target.slope,
        "max_grad_norm": target.slope,
        "accountant": dpb.PrivacyAccountant(),
        "target_accept_prob": None,
    }
    return kernel(target.model, num_steps=num_steps, **{**fitting, **settings, **options})


much_noise = partial(penalty, noise_multiplier=0.5, proposal_scale=0.4)


def p_value(kernel, target, draws=700, iterations=6):
    """Smallest p-value of uniformity after ``iterations`` from exact draws."""
    kernel.setup(0, *target.args)
    ends = []
    for _ in range(draws):
        params = target.draw()
        for _ in range(iterations):
            params = kernel.sample(params)
        ends.append(params)
    rate = kernel.diagnostics()["acceptance rate"]
    assert 0.15 <= rate <= 0.8, f"an acceptance rate of {rate} tests little"
    return smallest(target.uniforms(ends))


def smallest(uniforms):
    """p-value of uniformity; folded in the middle a posterior that is too wide on both sides
    shows as well.
    """
    return min(kstest(v, "uniform").pvalue for u in uniforms for v in (u, abs(2 * u - 1)))


class WithoutPenalty:
    def _metropolis(self, log_ratio, rest, bound, multiplier):
        return super()._metropolis(
            log_ratio, rest + (multiplier * bound) ** 2 / 2, bound, multiplier
        )


class PenaltyWithoutPenalty(WithoutPenalty, DPPenalty):
    pass


class KeepsTheStartsGradient(DPHMC):
    """After an acceptance the gradient where the trajectory started is kept."""

    def _iterate(self, theta):
        before = self._gradient
        moved, outcome = super()._iterate(theta)
        if before is not None:
            self._gradient = before
        return moved, outcome


def thinned_p_value(kernel, target, draws):
    """Smallest p-value of uniformity of a chain from the prior, thinned to two
    autocorrelation times.
    """
    runner = MCMC(kernel, num_samples=draws, warmup_steps=200, disable_progbar=True)
    runner.run(*target.args)
    rate = runner.diagnostics()["acceptance rate"]["chain 0"]
    assert 0.15 <= rate <= 0.8, f"an acceptance rate of {rate} tests little"
    (samples,) = runner.get_samples().values()
    samples = samples.reshape(len(samples))
    thin = math.ceil(2 * len(samples) / float(effective_sample_size(samples[None], 0, 1)))
    params = [
        {"mean": s[None]} if isinstance(target, Gaussian) else {"rate": s.logit()}
        for s in samples[::thin]
    ]
    assert len(params) > 200
    return smallest(target.uniforms(params))


def counts(accountant):
    return {charge.event.noise_multiplier: charge.count for charge in accountant.history}
