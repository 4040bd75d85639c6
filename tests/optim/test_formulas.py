"""Steps, noise and charges of all samplers against their formulas, written down once more in flat
float64 vectors, over drawn settings: groups, priors, schedules, floors, clip norms that are
derived, batches and neighbours.
"""

import math
from functools import partial

import pytest
import torch
from dp_accounting import dp_event
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.steps import bare
from torch import nn

from torch_dpbayes.accounting import PrivacyAccountant, events
from torch_dpbayes.optim import DPSGFS, DPSGHMC, DPSGLD, DPSGNHT
from torch_dpbayes.optim.sgnht import sum_of_squares

N, ROWS, LRS, SIZES = 60, 9, (0.4, 0.1), (8, 3)
INF, FAN_IN = math.inf, math.sqrt(2 / 3)
SHARE, DECAY, GAIN = 0.4, 0.7, 0.5
# σ of the weight (2, 3), its bias (2), and the other group (3)
PRIORS = [
    (0.3, (0.3, 0.3, 0.3)),
    (INF, (INF, INF, INF)),
    ("fan_in", (FAN_IN, 1.0, 1.0)),
    ({"layer": 0.2, "layer.bias": 3.0, "other": "fan_in"}, (0.2, 3.0, 1.0)),
    ({"layer": "fan_in", "other": INF}, (FAN_IN, 1.0, INF)),
    ({"layer.bias": 0.4}, (1.0, 0.4, 1.0)),
]
FISHER = partial(DPSGFS, fisher_share=SHARE, fisher_decay=DECAY)
# the friction of each group's momentum
SAMPLERS = {
    "sgld": (DPSGLD, (1.0, 1.0)),
    "sghmc": (DPSGHMC, (0.3, 0.6)),
    "matched": (partial(DPSGHMC, momentum="matched"), (1.0, 1.0)),
    "sgnht": (partial(DPSGNHT, momentum=0.7, thermostat_gain=GAIN), (0.3, 0.3)),
    "full": (FISHER, (1.0, 1.0)),
    "diagonal": (partial(FISHER, fisher="diagonal"), (1.0, 1.0)),
}
BATCHES = {
    "poisson": dp_event.PoissonSampledDpEvent,
    "full": dp_event.GaussianDpEvent,
    "recordwise": events.RecordwiseBatchGaussianDpEvent,
    "unspecified": events.UnspecifiedBatchGaussianDpEvent,
}
OF_BATCHES = [(kind, "replace_one") for kind in ("poisson", "full", "unspecified")]
OF_BATCHES += [(kind, "add_or_remove_one") for kind in ("poisson", "full", "recordwise")]


def spread(values, sizes=SIZES):
    """One number of each group for each of its numbers."""
    return torch.tensor(values, dtype=torch.float64).repeat_interleave(torch.tensor(sizes))


class Formula:
    """A sampler's constants and state, and what the class docstrings say of its step."""

    def __init__(self, name, theta, stds, mean, floor, temperature, clip, batch, scale):
        self.name, self.theta, self.friction = name, theta, SAMPLERS[name][1]
        self.is_fisher, d = name in ("full", "diagonal"), len(theta)
        self.precision, self.mean = spread(stds, (6, 2, 3)) ** -2, mean
        self.floor, self.temperature, self.batch = floor, temperature, batch
        self.scale = torch.ones(d).double() if scale is None else scale
        self.clip = min(self.own_clip(k) for k in (0, 1)) if clip is None else clip
        self.velocity, self.before, self.alpha = torch.zeros(d).double(), (0.0, 0.0), None
        self.fisher = self.clip**2 * torch.eye(d).double()  # in units of F
        self.steps, self.left = 0, 0.0

    def own_clip(self, k):
        heat = 2 * self.friction[k] * self.temperature / (LRS[k] * N)
        return self.batch / self.floor * math.sqrt(heat)

    def heat(self, lr, z):
        return lr * N * (z * self.clip / self.batch) ** 2

    def t(self, k, lr):
        if self.temperature is None:
            return self.heat(lr, self.floor) / (2 * self.friction[k])
        return self.temperature

    def own(self, k, lr):
        if lr == 0:
            return INF
        if self.name == "matched":
            return 0.0
        heat = 2 * self.friction[k] * self.t(k, lr) / (lr * N)
        return self.batch / self.clip * math.sqrt(heat)

    def z(self, k, lr):
        return max(self.own(k, lr), self.floor) if lr > 0 else self.floor or INF

    def hottest(self, lrs):
        holds = self.is_fisher or self.name in ("matched", "sgnht")
        return max(
            (self.t(k, lr) if holds else self.heat(lr, self.z(k, lr)) / (2 * self.friction[k]))
            if lr > 0
            else 0.0
            for k, lr in enumerate(lrs)
        )

    def free_lr(self):
        t = 1.0 if self.temperature is None else self.temperature
        heat = (self.batch / self.clip / self.floor) ** 2
        return min(2 * a * t * heat / N for a in self.friction)

    def charge(self, z, batches, neighboring):
        """z of a clipped sum alone that costs as much: C and C² together under add or remove; 2C,
        and at most √2·C² but never both at once, for a swap.
        """
        is_swap = neighboring == "replace_one" if batches == "full" else batches != "poisson"
        return z / math.sqrt(1 + SHARE) if self.is_fisher and not is_swap else z

    def noisy(self, sums, moment, lrs, stream):
        """S/B and M/B with noise from this stream."""
        zs, pieces = [self.z(k, lr) for k, lr in enumerate(lrs)], []
        for z, piece in zip(zs, sums.split(SIZES)):
            if z < INF:
                xi = torch.empty_like(piece).normal_(generator=stream)
                piece = (piece + z * self.clip * xi) / self.batch
            pieces.append(piece if z < INF else torch.zeros_like(piece))
        xi = torch.empty_like(moment).normal_(generator=stream)
        moment = (moment + min(zs) * self.clip**2 / math.sqrt(SHARE) * xi) / self.batch
        return self.scale * torch.cat(pieces), moment

    def step(self, lrs, released, moment):
        """θ after a step on S/B and M/B."""
        eta, pull = spread(lrs), self.precision * (self.theta - self.mean)
        gradient = released + pull / N
        if self.name == "sgld":
            self.theta = self.theta - eta * gradient
        elif self.is_fisher:
            self.score(lrs, gradient, moment)
        else:
            self.move(lrs, eta, gradient)
        return self.theta

    def needed(self, k, lr):
        return self.heat(lr, self.z(k, lr)) / (2 * self.t(k, lr)) if lr > 0 else 0.0

    def move(self, lrs, eta, gradient):
        old = self.velocity
        active = [k for k in (0, 1) if lrs[k] > 0]
        friction = spread(self.friction)
        if self.name == "matched":
            ratio = [b / a if a > 0 else 1.0 for a, b in zip(self.before, lrs)]
            old, self.before = old * spread(ratio).sqrt(), lrs
            friction = spread([self.needed(k, lr) for k, lr in enumerate(lrs)])
        elif self.name == "sgnht":
            n = sum(SIZES[k] for k in active)
            if self.alpha is None and active:
                self.alpha = sum(SIZES[k] * self.needed(k, lrs[k]) for k in active) / n
            friction = self.alpha or 0.0
        self.velocity = (1 - friction) * old - eta * gradient
        self.theta = self.theta + self.velocity
        if self.name == "sgnht" and active:
            halves = ((old + self.velocity) / 2).split(SIZES)
            kinetic = sum(
                N / (n * lrs[k] * self.t(k, lrs[k])) * float(halves[k].square().sum())
                for k in active
            )
            self.alpha = min(self.alpha + GAIN * (kinetic - 1), 1.2)

    def score(self, lrs, gradient, moment):
        q, t, d = self.batch / N, self.hottest(lrs), len(self.theta)
        zs = [self.z(k, lr) for k, lr in enumerate(lrs)]
        if min(zs) == INF:
            return
        moves = spread(lrs) > 0
        if self.name == "full":
            values, vectors = torch.linalg.eigh(self.fisher)
            least = self.left * math.sqrt(2 * d)
            information = (vectors * values.clamp(min=least)) @ vectors.T
            moment = (moment + moment.T) / 2
        else:
            least = self.left * math.sqrt(2)
            information = self.fisher.diagonal().clamp(min=least).diag()
            moment = moment.diag()
        units = self.scale.diag()
        information = N * units @ information @ units
        noise = self.scale * spread([0.0 if lr == 0 else z for z, lr in zip(zs, lrs)])
        covariance = (1 - q) / q * information + (noise * self.clip / q).square().diag()
        whole = (t * (information + self.precision.diag()) + covariance)[moves][:, moves]
        moved = 2 * t * torch.linalg.solve(whole, N * gradient[moves])
        self.theta = self.theta.clone()
        self.theta[moves] -= moved
        beta = max(1 - DECAY, 1 / (self.steps + 2))
        added = min(zs) * self.clip**2 / math.sqrt(SHARE) / self.batch
        self.fisher = (1 - beta) * self.fisher + beta * moment
        self.left = math.hypot((1 - beta) * self.left, beta * added)
        self.steps += 1


def density(stds, mean):
    """log p of named parameters, for ``log_prior``."""

    def log_density(named):
        mu = torch.tensor(mean, dtype=torch.float64)
        laws = [torch.distributions.Normal(mu, s) for s in stds]
        terms = [law.log_prob(p).sum() for law, p in zip(laws, named.values()) if law.scale < INF]
        return sum(terms, torch.zeros((), requires_grad=True))

    return log_density


FACTORS = st.sampled_from([1.0, 1.0, 0.3, 0.0])


@pytest.mark.filterwarnings("ignore:steps are charged at sensitivity 2C:UserWarning")
@pytest.mark.parametrize("name", SAMPLERS)
@examples(100)
@given(
    prior=st.sampled_from(PRIORS),
    mean=st.sampled_from([0.0, 0.4]),
    is_function=st.booleans(),
    floor=st.sampled_from([0.0, 0.3, 0.9]),  # in units of SGLD's own noise
    temperature=st.sampled_from([None, 0.0, 0.7]),
    clip=st.sampled_from([None, 0.05, 3.0]),
    of=st.sampled_from(OF_BATCHES),
    is_scaled=st.booleans(),
    is_tensor=st.booleans(),
    factors=st.lists(st.tuples(FACTORS, FACTORS), min_size=4, max_size=4),
)
def test_steps_and_charges_are_those_of_the_formulas(
    name, prior, mean, is_function, floor, temperature, clip, of, is_scaled, is_tensor, factors
):
    make, is_fisher, (batches, neighboring) = SAMPLERS[name][0], name in ("full", "diagonal"), of
    batch = N if batches == "full" else 12
    if temperature == 0 and (name in ("matched", "sgnht") or is_fisher or clip is None):
        temperature = 0.7
    if name == "matched":
        temperature, clip, floor = temperature or 0.7, clip or 0.6, floor or 0.5
    if clip is None:
        floor = floor or 0.5
    floor *= batch / (clip or 0.6) * math.sqrt(2 * (temperature or 1.0) / (LRS[0] * N))
    stated, stds = prior
    options = {"prior_std": stated, "prior_mean": mean}
    if is_function and not is_fisher:
        options = {"log_prior": density(stds, mean)}
    scale = 0.5 + torch.rand(11).double() if is_scaled and is_fisher else None
    if is_fisher:
        options["sensitivity_scale"] = scale
    shapes = {"layer.weight": (2, 3), "layer.bias": (2,), "other": (3,)}
    named = [(n, nn.Parameter(torch.randn(shape).double())) for n, shape in shapes.items()]
    groups = [{"params": g, "lr": lr} for g, lr in zip((named[:2], named[2:]), LRS)]
    if name == "sghmc":
        groups = [dict(g, momentum=1 - a) for g, a in zip(groups, SAMPLERS[name][1])]
    accountant = PrivacyAccountant(neighboring=neighboring)
    optimizer = bare(
        groups,
        make,
        num_data=N,
        expected_batch_size=batch,
        noise_multiplier=floor,
        temperature=temperature,
        max_grad_norm=clip,
        sampling=batches if batches in ("poisson", "recordwise") else None,
        accountant=accountant,
        generator=torch.Generator().manual_seed(torch.seed()),
        **options,
    )
    if temperature is None and (clip is None or floor == 0):
        temperature = 1.0
    parameters, d = [p for _, p in named], 11
    theta = torch.cat([p.detach().flatten() for p in parameters])
    formula = Formula(name, theta, stds, mean, floor, temperature, clip, batch, scale)
    assert optimizer.max_grad_norm == pytest.approx(formula.clip, rel=1e-12)
    assert optimizer.free_lr == (pytest.approx(formula.free_lr()) if floor else INF)
    query, add_noise, released = optimizer.release.query, optimizer.release.query.add_noise, []

    def recording(layout, smallest, stream):
        moment = rows.T @ rows if name == "full" else rows.square().sum(0)
        torch.testing.assert_close(layout.gradient, rows.sum(0))
        if is_fisher:
            torch.testing.assert_close(layout.extra, moment.flatten())
        released[:] = formula.noisy(rows.sum(0), moment, lrs, stream.clone_state())
        add_noise(layout, smallest, stream)
        torch.testing.assert_close(layout.gradient, released[0])
        if is_fisher:
            torch.testing.assert_close(layout.extra, released[1].flatten())

    query.add_noise = recording
    charges = []
    for pair in factors:
        lrs = tuple(lr * factor for lr, factor in zip(LRS, pair))
        for group, lr in zip(optimizer.param_groups, lrs):
            group["lr"] = torch.tensor(lr, dtype=torch.float64) if is_tensor else lr
        z = min(formula.z(k, lr) for k, lr in enumerate(lrs))
        own = min(formula.own(k, lr) for k, lr in enumerate(lrs))
        assert optimizer.effective_noise_multiplier == pytest.approx(z)
        assert optimizer.langevin_noise_multiplier == pytest.approx(own)
        assert optimizer.effective_temperature == pytest.approx(formula.hottest(lrs))
        released[:] = torch.zeros(d).double(), torch.zeros(d, d).double()
        rows = torch.randn(batch if batch == N else ROWS, d).double()
        for p, piece in zip(parameters, rows.split([6, 2, 3], dim=1)):
            p.grad_sample = piece.reshape(len(rows), *p.shape).clone()
        rows = rows if scale is None else rows / scale
        rows = rows * (formula.clip / rows.norm(dim=1, keepdim=True)).clamp(max=1.0)
        optimizer.step()
        found = torch.cat([p.detach().flatten() for p in parameters])
        torch.testing.assert_close(found, formula.step(lrs, *released), rtol=1e-7, atol=1e-9)
        assert z < INF or not optimizer._layout.extra.any()  # no sum without noise is left
        if z < INF:
            charges.append(formula.charge(z, batches, neighboring))
    charged = []
    for event, count, *_ in accountant.history:
        is_private = not isinstance(event, dp_event.NonPrivateDpEvent)
        assert type(event) is BATCHES[batches] or not is_private
        if type(event) is dp_event.PoissonSampledDpEvent:
            assert event.sampling_probability == batch / N
            event = event.event
        charged += [event.noise_multiplier if is_private else 0.0] * int(count)
    assert sorted(charged) == pytest.approx(sorted(charges))


def test_the_kinetic_energy_of_many_parameters_is_not_rounded_down():
    vector = torch.randn(2**23)
    exact = float(torch.linalg.vector_norm(vector.double())) ** 2
    assert sum_of_squares(vector) == pytest.approx(exact, rel=1e-6)
