"""Models whose posteriors are known in closed form, and kernels for them. No clip bound here can be
reached.
"""

import math
from functools import cache, partial

import pyro
import pyro.distributions as dist
import torch
from scipy.stats import beta, kstest, norm

import torch_dpbayes as dpb
from torch_dpbayes.accounting import events
from torch_dpbayes.mcmc import DPHMC, DPPenalty, ExponentialFamilyPenalty

# of one look at a law, of at most seven directions, each seen as it is and folded in the middle
CHANCE = 2e-4
LEVEL = CHANCE / 14

PRIOR_STD = 0.3
ROWS = torch.linspace(-1.0, 2.0, 20).double()[:, None] + torch.arange(4).double() / 2
TOSSES = torch.tensor([1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 1, 0]).double()
GROUPS, SPREAD = 3, 0.7
GROUP, VALUES = torch.arange(9) % GROUPS, torch.linspace(-1.0, 2.0, 9).double()


def gaussian_prior(dimension):
    return pyro.sample("mean", dist.Normal(0.0, PRIOR_STD).expand([dimension]).to_event(1))


# of each dimension one, by which recorded priors are found
gaussian_prior_of = cache(partial(partial, gaussian_prior))


def bernoulli_prior():
    return pyro.sample("rate", dist.Beta(2.0, 3.0))


def hierarchy():
    mean = pyro.sample("mu", dist.Normal(0.0, 1.5))
    with pyro.plate("groups", GROUPS):
        return pyro.sample("level", dist.Normal(mean, SPREAD))


class Gaussian:
    slope = 20.0

    def __init__(self, columns=1):
        self.args = (ROWS[:, :columns].clone(),)
        self.precision = PRIOR_STD**-2 + len(ROWS)
        self.mean = self.args[0].sum(0) / self.precision

    @staticmethod
    def model(x):
        mean = gaussian_prior(x.shape[1])
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x)

    def draw(self):
        return {"mean": self.mean + torch.randn(len(self.mean)) / self.precision**0.5}

    def uniforms(self, params):
        """For exact draws of the posterior: uniforms of coordinates, and of directions across."""
        z = (torch.stack([p["mean"] for p in params]) - self.mean) * self.precision**0.5
        return [norm.cdf(z[:, 0])] + (
            [norm.cdf(z[:, 1]), norm.cdf((z[:, 0] + z[:, 1]) / 2**0.5)] if z.shape[1] == 2 else []
        )


class Tosses:
    slope, args = 2.0, (TOSSES,)
    posterior = 2 + float(TOSSES.sum()), 3 + len(TOSSES) - float(TOSSES.sum())

    @staticmethod
    def model(y):
        rate = bernoulli_prior()
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Bernoulli(rate), obs=y)

    def draw(self):
        return {"rate": dist.Beta(*self.posterior).sample().logit()}

    def uniforms(self, params):
        return [beta(*self.posterior).cdf(torch.stack([p["rate"] for p in params]).sigmoid())]


class Hierarchy:
    """Of which no record reads ``mu``."""

    slope, args = 20.0, (GROUP, VALUES)

    def __init__(self):
        precision = torch.diag(torch.full((GROUPS + 1,), SPREAD**-2).double())
        precision[:GROUPS, :GROUPS] += torch.diag(torch.bincount(GROUP).double())
        precision[:GROUPS, -1] = precision[-1, :GROUPS] = -(SPREAD**-2)
        precision[-1, -1] = 1.5**-2 + GROUPS * SPREAD**-2
        sums = torch.zeros(GROUPS + 1).double().index_add(0, GROUP, VALUES)
        self.covariance = torch.linalg.inv(precision)
        self.mean, self.factor = self.covariance @ sums, torch.linalg.cholesky(self.covariance)

    @staticmethod
    def model(group, y):
        level = hierarchy()
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(level[group], 1.0), obs=y)

    def draw(self):
        x = self.mean + self.factor @ torch.randn(GROUPS + 1).double()
        return {"level": x[:GROUPS], "mu": x[GROUPS]}

    def uniforms(self, params):
        rows = torch.stack([torch.cat([p["level"], p["mu"][None]]) for p in params])
        contrast = torch.tensor([[-1 / GROUPS] * GROUPS + [1.0]])
        directions = torch.cat([torch.eye(GROUPS + 1), torch.ones(1, GROUPS + 1), contrast])
        directions = directions.double()
        stds = (directions @ self.covariance * directions).sum(1).sqrt()
        return [norm.cdf(column) for column in ((rows - self.mean) @ directions.T / stds).T]


# -- kernels ---------------------------------------------------------------------------------------


class Drift:
    """A random walk that prefers one direction."""

    event = events.NoOpDpEvent()

    def propose(self, params):
        moved = params["mean"] + 0.1 + 0.2 * torch.randn(1)
        back, forth = params["mean"] - moved - 0.1, moved - params["mean"] - 0.1
        return {"mean": moved}, float((forth**2 - back**2) / (2 * 0.2**2))


def settled(target, options):
    neighboring = options.pop("neighboring", "add_or_remove_one")
    accountant = dpb.PrivacyAccountant(neighboring=neighboring)
    return {"accountant": accountant, "target_accept_prob": None, **options}


def penalty(target, kernel=DPPenalty, **options):
    scale, noise = {Gaussian: (0.25, 0.25), Tosses: (0.8, 0.8), Hierarchy: (0.5, 0.08)}[
        type(target)
    ]
    fitting = {} if "proposal" in options else {"proposal_scale": scale}
    fitting |= {"noise_multiplier": noise, "log_ratio_slope": target.slope}
    return kernel(target.model, **{**fitting, **settled(target, options)})


def hmc(target, num_steps=2, kernel=DPHMC, **options):
    step, ratio, gradient = {
        Gaussian: (0.15, 0.25, 0.2),
        Tosses: (0.6, 0.8, 0.8),
        Hierarchy: (0.43, 0.06, 0.06),
    }[type(target)]
    fitting = {
        "step_size": step / max(num_steps, 1) ** 0.5,
        "ratio_noise_multiplier": ratio,
        "grad_noise_multiplier": gradient,
        "log_ratio_slope": target.slope,
        "max_grad_norm": target.slope,
    }
    settings = {**fitting, **settled(target, options)}
    return kernel(target.model, num_steps=num_steps, **settings)


def of_groups(group, y):
    one = (torch.arange(GROUPS) == group).double()
    return torch.cat([one, one * y])


FAMILIES = {
    Gaussian: (
        gaussian_prior,
        lambda x: x,
        lambda theta: theta["mean"],
        lambda theta: theta["mean"].square().sum() / 2,
        {"max_statistic_norm": 20.0, "proposal_scale": 0.25, "noise_multiplier": 0.25},
    ),
    Tosses: (
        bernoulli_prior,
        lambda y: y,
        lambda theta: theta["rate"].logit(),
        lambda theta: -torch.log1p(-theta["rate"]),
        {"max_statistic_norm": 1.0, "proposal_scale": 0.8, "noise_multiplier": 1.0},
    ),
    Hierarchy: (
        hierarchy,
        of_groups,
        lambda theta: torch.cat([-(theta["level"] ** 2) / 2, theta["level"]]),
        lambda theta: torch.zeros(()),
        {"max_statistic_norm": 5.0, "proposal_scale": 0.5, "noise_multiplier": 0.2},
    ),
}


def family(target, kernel=ExponentialFamilyPenalty, **options):
    """The same posteriors from sufficient statistics."""
    prior, statistics, natural, normalizer, fitting = FAMILIES[type(target)]
    if isinstance(target, Gaussian):
        prior = gaussian_prior_of(len(target.mean))
    options = {"neighboring": "replace_one", **options}
    return kernel(
        prior,
        sufficient_statistics=statistics,
        natural_parameters=natural,
        log_normalizer=normalizer,
        **{**fitting, **settled(target, options)},
    )


MAKERS = {"penalty": penalty, "HMC": hmc, "family": family}


# -- laws ------------------------------------------------------------------------------------------


def smallest(uniforms):
    """p-value of uniformity; folded in the middle a posterior that is too wide on both sides
    shows as well.
    """
    return min(kstest(v, "uniform").pvalue for u in uniforms for v in (u, abs(2 * u - 1)))


def p_value(kernel, target, draws=400, iterations=4):
    """Smallest p-value of uniformity after ``iterations`` from exact draws."""
    kernel.setup(0, *target.args)
    ends = []
    for _ in range(draws):
        params = target.draw()
        for _ in range(iterations):
            params = kernel.sample(params)
        ends.append(params)
    rate = kernel.diagnostics()["acceptance rate"]
    assert 0.15 <= rate <= 0.9, f"an acceptance rate of {rate} tests little"
    return smallest(target.uniforms(ends))


def counts(accountant):
    return {charge.event.noise_multiplier: charge.count for charge in accountant.history}


def binomial_bounds(chance, level, count):
    """Between which a share of ``count`` lies, but for twice ``level``."""
    far = norm.isf(level) * math.sqrt(chance * (1 - chance) / count)
    return chance - far, chance + far
