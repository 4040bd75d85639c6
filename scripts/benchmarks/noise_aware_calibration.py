"""Do noise-aware posteriors cover? Draws parameters from the prior and records from the model, and
counts how many of the true parameters lie inside the posterior's central intervals.

    python scripts/benchmarks/noise_aware_calibration.py --sets 5 [--cells logistic_25 beta]

Finished data sets are lines of ``--results`` and are not made again. "sd / oracle's" is the mean
standard deviation over that of :func:`oracle`.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import torch_dpbayes as dpb
from torch_dpbayes.accounting.gdp import gaussian_mu
from torch_dpbayes.noise_aware import posterior

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reproductions"))
from reproduction import Row, finish, grouped, mean_and_error, parser_of

DELTA, LEVELS = 1e-5, (0.5, 0.9)


class Case(NamedTuple):
    """One data set.

    Attributes:
        model, data: of the call.
        truth: by site.
        options: of the call.
        oracle: mean standard deviation of the true curvature with all of the budget on gradients
            at the mode, or None.
    """

    model: Callable[..., Any]
    data: tuple[Tensor, ...]
    truth: dict[str, Tensor]
    options: Mapping[str, Any] = MappingProxyType({})
    oracle: float | None = None


Make = Callable[[float], Case]  # of the budget


def oracle(
    features: Tensor, slopes: Tensor, prior_std: float, epsilon: float, norm: float
) -> float:
    """Mean sd of Λ = P + F(F+V)⁻¹F for gradients of at most ``norm``."""
    mu = gaussian_mu(epsilon, DELTA)
    curvature = (features * slopes[:, None]).T @ features
    eye = torch.eye(len(curvature), dtype=torch.float64)
    told = curvature @ torch.linalg.solve(curvature + (norm / mu) ** 2 * eye, curvature)
    return float(torch.linalg.inv(eye / prior_std**2 + told).diagonal().sqrt().mean())


def shortened(features: Tensor, norm: float = 1.0) -> Tensor:
    """The rows, none longer than that."""
    return features / (features.norm(dim=1, keepdim=True) / norm).clamp_min(1.0)


def logistic_model(prior_std: float) -> Callable[..., None]:
    """Logistic regression."""

    def model(x: Tensor, y: Tensor) -> None:
        zeros = torch.zeros(x.shape[1], dtype=torch.float64)
        w = pyro.sample("w", dist.Normal(zeros, prior_std).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    return model


def logistic(
    size: int, prior_std: float, n: int, decades: float = 0.0, clip: float | None = None
) -> Make:
    """Gaussian features whose standard deviations fall by so many decades; ``clip`` in units of the
    mean length of a score at the truth.
    """

    def make(epsilon: float) -> Case:
        scales = torch.logspace(0, -decades, size, dtype=torch.float64)
        scales = scales / scales.square().sum().sqrt()
        basis = torch.linalg.qr(torch.randn(size, size))[0]
        x = shortened(torch.randn(n, size) @ (basis * scales).T)
        w = prior_std * torch.randn(size)
        p = torch.sigmoid(x @ w)
        y = torch.bernoulli(p)
        best = oracle(x, p * (1 - p), prior_std, epsilon, 1.0)
        typical = float((2 * p * (1 - p) * x.norm(dim=1)).mean())
        options = {} if clip is None else {"max_grad_norm": clip * typical}
        return Case(logistic_model(prior_std), (x, y), {"w": w}, options, best)

    return make


def with_constant(kind: str, size: int, prior_std: float, n: int) -> Make:
    """A constant column and features that are half binary, or t(3)."""

    def make(epsilon: float) -> Case:
        if kind == "binary":
            x, half = torch.randn(n, size) / math.sqrt(size), size // 2
            shares = torch.tensor([0.5, 0.2, 0.1, 0.3] * size)[: size - half]
            x[:, half:] = (torch.rand(n, size - half) < shares).double() * 1.3 / math.sqrt(size)
        else:
            x = torch.distributions.StudentT(3.0).sample((n, size)) / math.sqrt(3 * size)
        bound = math.sqrt(0.75)
        x[:, 1:] = shortened(x[:, 1:], bound)
        x[:, 0] = 0.5
        w = prior_std * torch.randn(size)
        p = torch.sigmoid(x @ w)
        options = {"constant_columns": {0: 0.5}, "max_feature_norm": bound}
        best = oracle(x, p * (1 - p), prior_std, epsilon, 1.0)
        return Case(logistic_model(prior_std), (x, torch.bernoulli(p)), {"w": w}, options, best)

    return make


def rare_class(n: int) -> Make:
    """An intercept of prior sd 4; only the intercept is judged."""

    def model(x: Tensor, y: Tensor) -> None:
        zero = torch.zeros((), dtype=torch.float64)
        b = pyro.sample("b", dist.Normal(zero, 4.0))
        w = pyro.sample("w", dist.Normal(zero.expand(x.shape[1]), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Bernoulli(logits=b + x @ w), obs=y)

    def make(epsilon: float) -> Case:
        x = shortened(torch.randn(n, 4) / 2)
        b = 4 * torch.randn(())
        y = torch.bernoulli(torch.sigmoid(b + x @ torch.randn(4)))
        return Case(model, (x, y), {"b": b})

    return make


def beta(n: int, clip: float | None) -> Make:
    """Beta(a, b) with lognormal priors."""

    def model(x: Tensor) -> None:
        place = torch.tensor(1.2, dtype=torch.float64)
        a = pyro.sample("a", dist.LogNormal(place, 0.7))
        b = pyro.sample("b", dist.LogNormal(place, 0.7))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Beta(a, b), obs=x)

    def make(epsilon: float) -> Case:
        a, b = (1.2 + 0.7 * torch.randn(2)).exp()
        x = torch.distributions.Beta(a, b).sample((n,)).clamp(1e-12, 1 - 1e-12)
        return Case(model, (x,), {"a": a, "b": b}, {"max_grad_norm": clip})

    return make


def groups(n: int, count: int, has_slopes: bool = False) -> Make:
    """Varying intercepts, and perhaps slopes of the first feature."""

    def model(x: Tensor, g: Tensor, y: Tensor) -> None:
        one = torch.ones((), dtype=torch.float64)
        scale = pyro.sample("scale", dist.HalfNormal(one))
        mean = pyro.sample("mean", dist.Normal(0 * one, one))
        a = pyro.sample("a", dist.Normal(mean.expand(count), scale).to_event(1))
        w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=torch.float64), 1.0).to_event(1))
        slopes = torch.zeros(count, dtype=torch.float64)
        if has_slopes:
            of_slopes = pyro.sample("of_slopes", dist.HalfNormal(one))
            slopes = pyro.sample("b", dist.Normal(slopes, of_slopes).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Bernoulli(logits=a[g] + x @ w + slopes[g] * x[:, 0]), obs=y)

    def make(epsilon: float) -> Case:
        g, x = torch.randint(count, (n,)), shortened(torch.randn(n, 2) / 1.5)
        scale, mean = torch.randn(()).abs(), torch.randn(())
        a, w = mean + scale * torch.randn(count), torch.randn(2)
        truth, slopes = {"a": a, "w": w, "scale": scale, "mean": mean}, torch.zeros(count)
        if has_slopes:
            truth["of_slopes"] = torch.randn(()).abs()
            truth["b"] = slopes = truth["of_slopes"] * torch.randn(count)
        y = torch.bernoulli(torch.sigmoid(a[g] + x @ w + slopes[g] * x[:, 0]))
        return Case(model, (x, g, y), truth)

    return make


def horseshoe(n: int, size: int) -> Make:
    """Logistic regression; each weight has a half-Cauchy scale, and all share one more."""

    def model(x: Tensor, y: Tensor) -> None:
        one = torch.ones((), dtype=torch.float64)
        common = pyro.sample("common", dist.HalfCauchy(one))
        own = pyro.sample("own", dist.HalfCauchy(one.expand(size)).to_event(1))
        w = pyro.sample("w", dist.Normal(torch.zeros_like(own), common * own).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    def make(epsilon: float) -> Case:
        x = shortened(torch.randn(n, size) / math.sqrt(size))
        common, own = (torch.distributions.HalfCauchy(1.0).sample((k,)) for k in (1, size))
        w = common * own * torch.randn(size)
        y = torch.bernoulli(torch.sigmoid(x @ w))
        return Case(model, (x, y), {"w": w, "common": common[0], "own": own})

    return make


def mixture(n: int) -> Make:
    """Two normal distributions: unknown means, the first below the second, and weights."""

    def model(x: Tensor) -> None:
        one = torch.ones((), dtype=torch.float64)
        low = pyro.sample("low", dist.Normal(-one, one))
        gap = pyro.sample("gap", dist.LogNormal(one, 0.4))
        share = pyro.sample("share", dist.Beta(4 * one, 4 * one))
        shares = torch.stack([share, 1 - share])
        parts = dist.Normal(torch.stack([low, low + gap]), 1.0)
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.MixtureSameFamily(dist.Categorical(shares), parts), obs=x)

    def make(epsilon: float) -> Case:
        low, gap = torch.randn(()) - 1, (1 + 0.4 * torch.randn(())).exp()
        share = torch.distributions.Beta(4.0, 4.0).sample()
        x = low + gap * (torch.rand(n) > share) + torch.randn(n)
        return Case(model, (x,), {"low": low, "gap": gap, "share": share})

    return make


def ordinal(n: int, size: int) -> Make:
    """Four grades, whose cut points are unknown."""

    def law(u: Tensor, first: Tensor, gaps: Tensor) -> Any:
        cuts = torch.cat([first[None], first + gaps.cumsum(0)])
        return dist.OrderedLogistic(u, cuts)

    def model(x: Tensor, y: Tensor) -> None:
        zeros = torch.zeros(size, dtype=torch.float64)
        w = pyro.sample("w", dist.Normal(zeros, 2.0).to_event(1))
        first = pyro.sample("first", dist.Normal(zeros[0] - 1, 1.0))
        gaps = pyro.sample("gaps", dist.LogNormal(zeros[:2], 0.5).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", law(x @ w, first, gaps), obs=y)

    def make(epsilon: float) -> Case:
        x, w = shortened(torch.randn(n, size) / math.sqrt(size)), 2 * torch.randn(size)
        first, gaps = torch.randn(()) - 1, (0.5 * torch.randn(2)).exp()
        y = law(x @ w, first, gaps).sample()
        return Case(model, (x, y), {"w": w, "first": first, "gaps": gaps})

    return make


def observed(law: Callable[..., Any], size: int, n: int, extra: str | None = None) -> Make:
    """y | x with a linear predictor of ``size`` weights N(0, 1), and perhaps a scale."""

    def model(x: Tensor, y: Tensor) -> None:
        zeros = torch.zeros(size, dtype=torch.float64)
        w = pyro.sample("w", dist.Normal(zeros, 1.0).to_event(1))
        more = pyro.sample(extra, dist.LogNormal(zeros[0], 0.5)) if extra else None
        with pyro.plate("data", len(y)):
            pyro.sample("y", law(x @ w, more), obs=y)

    def make(epsilon: float) -> Case:
        x, w = shortened(torch.randn(n, size) / math.sqrt(size)), torch.randn(size)
        more = (0.5 * torch.randn(())).exp() if extra else None
        y = law(x @ w, more).sample()
        truth = {"w": w}
        if extra is not None and more is not None:
            truth[extra] = more
        return Case(model, (x, y), truth)

    return make


def student(u: Tensor, scale: Tensor) -> Any:
    return dist.StudentT(torch.tensor(4.0, dtype=torch.float64), u, scale)


def poisson(u: Tensor, _: None) -> Any:
    return dist.Poisson(u.exp())


def gamma(u: Tensor, shape: Tensor) -> Any:
    return dist.Gamma(shape.expand(u.shape), shape / u.exp())


def negative_binomial(u: Tensor, shape: Tensor) -> Any:
    return dist.GammaPoisson(shape.expand(u.shape), shape / u.exp())


def probit(u: Tensor, _: None) -> Any:
    return dist.Bernoulli(torch.special.ndtr(u).clamp(1e-9, 1 - 1e-9))


# rows of the table: how data sets are made, and ε
CELLS: dict[str, tuple[Make, float]] = {
    "logistic, d = 25, prior sd 3": (logistic(25, 3.0, 10_000), 1.0),
    "logistic, d = 8, prior sd 1": (logistic(8, 1.0, 10_000), 1.0),
    "logistic, d = 8, ε = .3, prior sd 3": (logistic(8, 3.0, 10_000), 0.3),
    "logistic, d = 60, condition 100": (logistic(60, 3.0, 10_000, 1.0), 1.0),
    "logistic, d = 60, condition 1,000": (logistic(60, 3.0, 10_000, 1.5), 1.0),
    "logistic, d = 60, condition 10,000": (logistic(60, 3.0, 10_000, 2.0), 1.0),
    "half binary, d = 10, prior sd 3": (with_constant("binary", 10, 3.0, 10_000), 1.0),
    "features from t(3), d = 10, prior sd 3": (with_constant("t3", 10, 3.0, 10_000), 1.0),
    "half binary, d = 10, n = 1,000, ε = .3, prior sd 1": (
        with_constant("binary", 10, 1.0, 1000),
        0.3,
    ),
    "logistic, d = 8, n = 1,000, ε = .1, prior sd 3": (logistic(8, 3.0, 1000), 0.1),
    "logistic, d = 8, n = 1,000, prior sd 3": (logistic(8, 3.0, 1000), 1.0),
    "logistic, d = 8, n = 100,000, ε = 3, prior sd 3": (logistic(8, 3.0, 100_000), 3.0),
    "logistic, d = 100, n = 100,000, ε = 3, prior sd 1": (logistic(100, 1.0, 100_000), 3.0),
    "rare class, intercept of sd 4, n = 20,000": (rare_class(20_000), 1.0),
    "Beta, clip bound 1": (beta(4000, 1.0), 1.0),
    "Beta, clip bound 2": (beta(4000, 2.0), 1.0),
    "Beta, clip bound 6": (beta(4000, 6.0), 1.0),
    "Beta, default bound": (beta(4000, None), 1.0),
    "20 groups": (groups(10_000, 20), 1.0),
    "Poisson": (observed(poisson, 5, 10_000), 1.0),
    "probit": (observed(probit, 5, 10_000), 1.0),
    "Student t, unknown scale": (observed(student, 5, 10_000, "scale"), 1.0),
    "gamma, unknown shape": (observed(gamma, 5, 10_000, "shape"), 1.0),
    "negative binomial": (observed(negative_binomial, 5, 10_000, "shape"), 1.0),
    "8 groups with slopes": (groups(10_000, 8, has_slopes=True), 1.0),
    "horseshoe, d = 10": (horseshoe(10_000, 10), 1.0),
    "mixture of two": (mixture(10_000), 1.0),
    "ordinal, 4 levels": (ordinal(10_000, 5), 1.0),
    "logistic, d = 8, clip bound .5": (logistic(8, 2.0, 10_000, clip=0.5), 1.0),
    "logistic, d = 8, clip bound 1": (logistic(8, 2.0, 10_000, clip=1.0), 1.0),
    "logistic, d = 8, clip bound 2": (logistic(8, 2.0, 10_000, clip=2.0), 1.0),
    "logistic, d = 8, clip bound 5": (logistic(8, 2.0, 10_000, clip=5.0), 1.0),
    "logistic, d = 2, n = 1,000, ε = 8, prior sd 1": (logistic(2, 1.0, 1000), 8.0),
}


def one(cell: str, number: int) -> Row:
    """Shares of parameters inside intervals, the width, and seconds of one data set."""
    make, epsilon = CELLS[cell]
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1_000_003 * list(CELLS).index(cell) + number)
    case = make(epsilon)
    accountant = dpb.PrivacyAccountant(epsilon=epsilon, delta=DELTA)
    started = time.process_time()
    found = posterior(
        case.model, *case.data, accountant=accountant, num_data=len(case.data[0]), **case.options
    )
    seconds = time.process_time() - started  # of one core
    draws = found.sample(4000)
    below = [(draws[site] < value).double().mean(0).ravel() for site, value in case.truth.items()]
    apart = (torch.cat(below) - 0.5).abs()
    inside = {f"{level:.0%}": float((apart < level / 2).double().mean()) for level in LEVELS}
    sd = fmean(float(found.stddev[site].mean()) for site in case.truth)
    return inside | {"sd": sd, "oracle": case.oracle, "seconds": seconds}


def table(rows: Sequence[Row]) -> list[Row]:
    """A line for each cell, and one for all."""
    lines = []
    for (cell,), some in [*grouped(rows, "cell").items(), (("all",), rows)]:
        line: Row = {"model and data (d: features)": cell}
        for level in LEVELS:
            mean, error = mean_and_error([row[f"{level:.0%}"] for row in some])
            line[f"{100 * level:.0f} %"] = f"{mean:.2f}±{error:.2f}"
        if cell != "all":
            oracles = [row["oracle"] for row in some if row["oracle"] is not None]
            line["sd / oracle's"] = (
                f"{fmean(row['sd'] for row in some) / fmean(oracles):.2f}" if oracles else None
            )
        lines.append(line)
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "noise_aware_calibration")
    parser.add_argument("--cells", nargs="*", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--sets", type=int, default=60)
    options = parser.parse_args(arguments)
    sets = range(1 if options.quick else options.sets)
    jobs = [{"cell": cell, "number": number} for number, cell in product(sets, options.cells)]
    finish(options, one, jobs, tables=lambda rows: {"": table(rows)})


if __name__ == "__main__":
    main()
