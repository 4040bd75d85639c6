"""The privacy loss of one pair: as quadrature nodes, and as masses on a grid.

*Connect the dots* (Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022): loss l between two points of
the grid h*Z is split between them so that its mass under P and under Q is kept. That is the
tightest privacy profile above the true one with losses on the grid. The masses are Gauss-Legendre
integrals over pieces cut at the grid, sums of positive terms, so that their *relative* error is of
the order of 1e-13 even in the tails.
"""

from __future__ import annotations

import math
from functools import singledispatch
from typing import NamedTuple

import numpy as np
from scipy import special

from .pairs import Array, BoundedRange, Gaussian, Pair, Pure, Sampled, has_two_directions

BEYOND = "the privacy loss is beyond the range of floating-point numbers"

_RULES = {degree: np.polynomial.legendre.leggauss(degree) for degree in (3, 5)}


def pieces(edges: Array, degree: int = 3) -> tuple[Array, Array]:
    """Gauss-Legendre nodes and weights on every interval between consecutive edges."""
    nodes, weights = _RULES[degree]
    half = np.diff(edges) / 2
    return ((edges[:-1] + half)[:, None] + half[:, None] * nodes).ravel(), (
        half[:, None] * weights
    ).ravel()


def _degree(width: float) -> int:
    """The rule for a normal density up to ``width`` standard deviations, on pieces of a tenth."""
    return 3 if width < 9 else 5


def log_mixture(x: Array, rate: float, noise: float) -> Array:
    """log(1 - q + q exp((2x - 1) / (2 z^2))), accurate where it is small and where the
    exponential overflows.
    """
    exponent = (2 * x - 1) / (2 * noise**2)
    low = np.minimum(exponent, 30.0)
    high = np.maximum(exponent, 30.0)
    return np.where(
        exponent < 30.0,
        np.log1p(rate * np.expm1(low)),
        high + math.log(rate) + np.log1p((1 - rate) / rate * np.exp(-high)),
    )


def _log_asinh_product(log_scale: float, loss: Array) -> Array:
    """asinh(exp(log_scale) * sinh(loss / 2)) without overflow, odd in loss."""
    half = np.abs(loss) / 2
    with np.errstate(divide="ignore"):
        log_product = log_scale + half + np.log(-np.expm1(-2 * half) / 2)
    magnitude = np.where(
        log_product > 300,
        log_product + math.log(2),
        np.arcsinh(np.exp(np.minimum(log_product, 300.0))),
    )
    return np.copysign(magnitude, loss)


def sampled_point(pair: Sampled, loss: Array) -> Array:
    """The x at which ``pair`` has the given loss."""
    q, z = pair.rate, pair.noise
    if pair.kind == "antipodal":
        log_scale = math.log((1 - q) / q) + 1 / (2 * z**2)
        return z**2 * (loss / 2 + _log_asinh_product(log_scale, loss))
    low = np.minimum(loss, 30.0)
    ratio = np.where(
        loss < 30.0, np.log1p(np.maximum(np.expm1(low) / q, -1 + 1e-300)), loss - math.log(q)
    )
    return 0.5 + z**2 * ratio


class Nodes(NamedTuple):
    """Losses of a pair with their masses under P. ``central`` is mass at loss 0 that the
    nodes leave out.
    """

    losses: Array
    masses: Array
    central: float = 0.0


@singledispatch
def loss_nodes(pair: Pair, tail: float, interval: float | None = None) -> Nodes:
    """Quadrature nodes of the privacy loss of ``pair``, all but P-mass (and Q-mass) ``tail``
    at either end.

    A new kind of pair that has a privacy loss distribution registers its own.

    Args:
        pair: a pair that has a loss distribution.
        tail: mass that may be left out at the upper end, and as much at the lower end.
        interval: if given, no piece of the quadrature crosses a multiple of it.
    """
    raise TypeError(f"{pair!r} has no privacy loss distribution.")


def has_loss_distribution(pair: Pair) -> bool:
    """Whether :func:`loss_nodes` knows this kind of pair."""
    return loss_nodes.dispatch(type(pair)) is not loss_nodes.dispatch(object)


@loss_nodes.register
def _(pair: Pure, tail: float, interval: float | None = None) -> Nodes:
    e = pair.epsilon
    return Nodes(np.array([-e, e]), special.expit(np.array([-e, e])))


@loss_nodes.register
def _(pair: BoundedRange, tail: float, interval: float | None = None) -> Nodes:
    b = pair.epsilon
    # towards the largest loss, which large tilts single out
    fine = b - 2 * b * np.geomspace(1e-9, 1.0, 60)
    edges = np.union1d(np.linspace(-b, b, 2 + int(20 * b)), np.append(fine, b))
    if interval is not None:
        edges = np.union1d(edges, np.clip(interval * _grid(-b, b, interval), -b, b))
    loss, weight = pieces(edges)
    return Nodes(loss, weight * np.exp((loss - b) / 2) / (2 * -math.expm1(-b)))


@loss_nodes.register
def _(pair: Gaussian, tail: float, interval: float | None = None) -> Nodes:
    width = -float(special.ndtri(tail))
    mu = pair.mu
    ends = mu - width, mu + width
    edges = np.linspace(*ends, 2 + int(20 * width))
    if interval is not None:
        grid = interval * _grid(mu * ends[0] - mu**2 / 2, mu * ends[1] - mu**2 / 2, interval)
        edges = np.union1d(edges, np.clip(grid / mu + mu / 2, *ends))
    x, weight = pieces(edges, _degree(width))
    return Nodes(mu * x - mu**2 / 2, weight * np.exp(-((x - mu) ** 2) / 2) / math.sqrt(2 * math.pi))


@loss_nodes.register
def _(pair: Sampled, tail: float, interval: float | None = None) -> Nodes:
    width = -float(special.ndtri(tail))
    q, z = pair.rate, pair.noise
    ends = (0.5 if pair.kind == "symmetric" else -z * width), 1 + z * width
    edges = np.linspace(*ends, 2 + int((ends[1] - ends[0]) / (0.1 * z * min(1.0, 2 * z))))
    if interval is not None:
        low, high = (_sampled_loss(pair, np.array([end]))[0] for end in ends)
        grid = interval * _grid(low, high, interval)
        grid = grid[(grid > low) & (grid < high)]
        edges = np.union1d(edges, np.clip(sampled_point(pair, grid), *ends))
    x, weight = pieces(edges, _degree(width))
    log_ratio = log_mixture(x, q, z)
    mass = weight * np.exp(log_ratio - x**2 / (2 * z**2)) / (z * math.sqrt(2 * math.pi))
    loss = log_ratio - log_mixture(-x, q, z) if pair.kind == "antipodal" else log_ratio
    if pair.kind != "symmetric":
        return Nodes(loss, mass)
    mirrored = mass * np.exp(-loss)
    central = max(0.0, 1.0 - float(mass.sum() + mirrored.sum()) - 2 * tail)
    return Nodes(np.concatenate([loss, -loss]), np.concatenate([mass, mirrored]), central)


def _sampled_loss(pair: Sampled, x: Array) -> Array:
    loss = log_mixture(x, pair.rate, pair.noise)
    return loss - log_mixture(-x, pair.rate, pair.noise) if pair.kind == "antipodal" else loss


def _grid(low: float, high: float, interval: float) -> Array:
    return np.arange(math.ceil(low / interval), math.floor(high / interval) + 1, dtype=np.float64)


class Masses(NamedTuple):
    """Masses at the losses ``interval * (first + arange(len(masses)))``; the rest,
    ``infinity``, is at +infinity.
    """

    first: int
    masses: Array
    infinity: float


def grid_masses(pair: Pair, interval: float, tail: float) -> tuple[Masses, Masses]:
    """Connect the dots: ``pair`` and its reverse on the grid ``interval * Z``.

    Args:
        interval: the discretisation interval.
        tail: mass of each end that may be moved upwards: to infinity, or to the lowest grid points.
    """
    nodes = loss_nodes(pair, tail, interval)
    cell = np.floor(nodes.losses / interval)
    first = int(min(cell.min(), -1 if nodes.central else cell.min()))
    index = cell.astype(np.int64) - first
    upper = nodes.masses * (
        np.expm1(np.minimum(cell * interval - nodes.losses, 0.0)) / math.expm1(-interval)
    )
    upper = np.minimum(upper, nodes.masses)
    size = int(index.max()) + 2
    masses = np.zeros(size)
    masses += np.bincount(index, nodes.masses - upper, size)
    masses += np.bincount(index + 1, upper, size)
    if nodes.central:
        masses[-first] += nodes.central
    if not has_two_directions(pair):
        masses[1] += tail
        return (Masses(first, masses, tail),) * 2
    if -interval * first > 700:
        raise OverflowError(BEYOND)
    # The nodes cover the bulk of both distributions, so their masses under the other one are all
    # there is but ``tail``.
    reverse = (masses * np.exp(-interval * (first + np.arange(size))))[::-1].copy()
    # The loss of what lies beyond the lower end is at most the second grid point's.
    masses[1] += tail
    reverse[1] += tail
    return Masses(first, masses, tail), Masses(-(first + size - 1), reverse, tail)
