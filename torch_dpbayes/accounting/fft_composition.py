"""Composition of privacy losses by FFT, and its privacy profile.

Let L be the privacy loss log dP/dQ under P, summed over the releases. Then

    delta(epsilon) = E[(1 - e^(epsilon - L))_+].

The FFTs use the distribution tilted by e^(theta L). The tilt moves the losses that decide delta to
the centre, where the relative round-off is small. Bounds on round-off, on losses beyond the window
and on truncated tails are added to delta. Mass that wraps around only increases delta.

The lower bound leaves out the mass at infinity, and bounds the discretisation by Hoeffding's
inequality: given L, the rounding of each step is independent, lies in one grid cell, and has a mean
in [0, h^2/8].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import fft, signal

from .dominating_pairs import Array, Gaussian, Pair, largest_loss, scattered_of
from .mixture_bounds import Mixtures, mixtures
from .privacy_loss import BEYOND, grid_masses, loss_nodes
from .tilted_window import (
    ACCURACY,
    LARGEST_WINDOW,
    SMALLEST,
    Window,
    choose_window,
    log_moment,
    log_of,
    log_outside,
)

Spectrum: TypeAlias = NDArray[np.complex128]

_WIDE_PILOT, _PILOT_SIZE = 2**20, 2**16  # a pilot with more grid points than 2**20 gets 2**16
_WIDEST_STEP = 2**20  # grid points of a release that is added to a composition
_ROUGH_SIZE = 2**16  # largest window before delta is known
# tries with a wider window; after the last one the bound is valid, but may be loose
_ATTEMPTS = 4
_STEP_ERROR = 1e-12  # relative error of one level's masses and of one multiplication of spectra
_MOST_KEPT = 2**24  # numbers in the spectra of all corners
_AT_ONCE = 2**22  # numbers in the spectra of releases between the same corners
_FAR_LOSS, _FAR_MU = 500.0, 1e4  # larger losses are not put on a grid
_NEGLIGIBLE = -45.0  # a modulus with a smaller logarithm is replaced by 0


def _power(spectrum: Spectrum, count: int) -> Spectrum:
    """spectrum ** count by repeated squaring: an order of magnitude faster than NumPy's
    complex power.
    """
    result = None
    while True:
        if count & 1:
            result = spectrum if result is None else result * spectrum
        count >>= 1
        if not count:
            assert result is not None
            return result
        spectrum = spectrum * spectrum


@dataclass
class Transform:
    """The spectrum of the tilted masses of releases, and other numbers of their sum. Compositions
    are products of transforms.
    """

    spectrum: Spectrum
    offset: int  # grid points from 0 to the smallest loss, and from there to the largest
    extent: int
    count: int
    infinity: float
    # log E exp(t L) at a tilt above, a tilt below and at the tilt; there also without the grid
    log_moments: Array
    left_out: float = 0.0  # error of an entry by frequencies that were replaced by 0

    def followed_by(self, other: Transform, times: int) -> Transform:
        return Transform(
            self.spectrum * _power(other.spectrum, times),
            self.offset + times * other.offset,
            self.extent + times * other.extent,
            self.count + times * other.count,
            self.infinity + times * other.infinity,
            self.log_moments + times * other.log_moments,
            self.left_out + times * other.left_out,
        )


def _transform_of(pair: Pair, window: Window, size: int, reverse: bool, tail: float) -> Transform:
    """The transform of one release."""
    level = grid_masses(pair, window.interval, tail)[reverse]
    grid = window.interval * (level.first + np.arange(len(level.masses)))
    log_masses = log_of(level.masses)
    log_moments = np.append(np.zeros(3), log_moment(pair, window.tilt, reverse, tail))
    for i, tilt in enumerate((window.upper_tilt, window.lower_tilt, window.tilt)):
        exponent = tilt * grid
        exponent += log_masses
        peak = float(exponent.max())
        tilted = np.exp(exponent - peak)
        norm = float(tilted.sum())
        log_moments[i] = peak + math.log(norm)
    tilted /= norm
    if len(tilted) > size:
        padded = np.append(tilted, np.zeros(-len(tilted) % size))
        tilted = padded.reshape(-1, size).sum(axis=0)
    placed = np.zeros(size)
    placed[: len(tilted)] = tilted
    spectrum = fft.rfft(np.roll(placed, level.first % size))
    return Transform(spectrum, level.first, len(level.masses) - 1, 1, level.infinity, log_moments)


def _transform(
    window: Window,
    size: int,
    levels: Mapping[Pair, int],
    reverse: bool,
    tail: float,
    mixed: Mixtures | bool,
) -> Transform:
    one = np.ones(size // 2 + 1, dtype=np.complex128)
    total = Transform(one, 0, 0, 0, 0.0, np.zeros(4))
    sampled, others = scattered_of(levels) if mixed is True else ([], dict(levels))
    near, found = window.near._replace(tilt=window.tilt), None
    if isinstance(mixed, Mixtures):
        found = _transform_of_mixtures(mixed, window, size, reverse, tail)
        if found is None:
            raise OverflowError(BEYOND)
    while sampled and found is None:
        if (groups := mixtures(sampled, near)) is None:
            others = dict(levels)
            break
        found = _transform_of_mixtures(groups, window, size, reverse, tail)
        # with fewer corners more frequencies fit into memory
        near = near._replace(excess=4 * near.excess, fewest=max(2, near.fewest // 2))
    total = total if found is None else found
    for pair, count in others.items():
        total = total.followed_by(_transform_of(pair, window, size, reverse, tail), count)
    return total


def _transform_of_mixtures(
    mixed: Mixtures, window: Window, size: int, reverse: bool, tail: float
) -> Transform | None:
    """The product over all releases, at frequencies where it is not negligible; ``None`` if these
    do not fit into memory. A product of N numbers is at most the N-th power of their mean.
    """
    number, frequencies = mixed.total, size // 2 + 1
    shares = mixed.shares
    kept = min(frequencies, max(_MOST_KEPT // len(shares), 1))
    spectra = np.zeros((len(shares), kept), dtype=np.complex128)
    log_moments = np.zeros((len(shares), 4))
    mean, infinity = np.zeros(frequencies), 0.0
    offset, end = 0, 0
    for i, corner in enumerate(mixed.corners):
        found = _transform_of(corner, window, size, reverse, tail)
        spectra[i], log_moments[i] = found.spectrum[:kept], found.log_moments
        mean += shares[i] * math.exp(found.log_moments[2]) * np.abs(found.spectrum)
        offset, end = min(offset, found.offset), max(end, found.offset + found.extent)
        infinity = max(infinity, found.infinity)
    moments = (mixed.weights[:, :, None] * np.exp(log_moments[mixed.among])).sum(axis=1)
    log_scale = float(mixed.counts @ np.log(moments[:, 2]))
    largest = number * log_of(mean) - log_scale  # bound on the log of the product
    counted = largest > _NEGLIGIBLE
    most = int(np.flatnonzero(counted)[-1]) + 1 if counted.any() else 1
    if most > kept:
        return None
    # weights for tilted masses; in each group they add up to 1
    scales = np.exp(log_moments[mixed.among, 2]) / moments[:, 2:3]
    weights = mixed.weights * scales
    spread = mixed.spread * scales[:, :, None] * scales[:, None, :]
    powers = np.ones((int(mixed.counts.max()).bit_length(), most), dtype=np.complex128)
    off = np.zeros(most)  # error of the logarithm of the product
    order = np.argsort(mixed.among @ np.array([1, 0, 0, 0]), kind="stable")
    starts = np.flatnonzero(np.any(np.diff(mixed.among[order], axis=0, prepend=-1) != 0, axis=1))
    for members in np.split(order, starts[1:]):
        corners = spectra[mixed.among[members[0]], :most]
        for part in np.array_split(members, 1 + len(members) * most // _AT_ONCE):
            means = weights[part] @ corners
            for bit in range(len(powers)):
                has = (mixed.counts[part] >> bit) & 1 == 1
                if has.any():
                    powers[bit] *= np.multiply.reduce(means[has], axis=0)
            if (several := mixed.counts[part] > 1).any():
                products = (corners[:, None] * corners[None].conj()).real.reshape(16, most)
                squared = spread[part][several].reshape(-1, 16) @ products
                squared = np.sqrt(np.maximum(squared, 0.0)) / np.abs(means[several])
                off += np.where(squared < 0.5, squared**2 / (2 - 2 * squared), np.inf).sum(axis=0)
    spectrum = np.zeros(frequencies, dtype=np.complex128)
    spectrum[:most] = powers[-1]
    for power in powers[-2::-1]:
        spectrum[:most] = spectrum[:most] ** 2 * power
    return Transform(
        spectrum,
        number * offset,
        number * (end - offset),
        number,
        number * infinity,
        mixed.counts @ np.log(moments),
        2 / size * float(_left_out(np.abs(spectrum), off, largest).sum()),
    )


def _left_out(modulus: Array, off: Array, largest: Array) -> Array:
    """Bound the error of the product at each frequency."""
    bound = modulus + np.exp(np.minimum(largest, 0.0))
    with np.errstate(over="ignore", invalid="ignore"):
        change = modulus[: len(off)] * np.expm1(np.minimum(off, 1.0))
    bound[: len(off)] = np.where(off < 1, np.minimum(change, bound[: len(off)]), bound[: len(off)])
    return bound


class Composition:
    """One direction, composed level by level on the tilted grid, with its privacy profile.

    ``levels``: the count of each pair, or their transform on this grid; ``tail``: the mass of each
    release that may be moved upwards.
    """

    def __init__(
        self,
        window: Window,
        levels: Mapping[Pair, int] | Transform,
        reverse: bool,
        tail: float,
        mixed: Mixtures | bool = True,
    ) -> None:
        self.window, self.interval, self.tail, self.reverse = window, window.interval, tail, reverse
        self._first = math.floor(window.lower / window.interval) - 2
        last = math.ceil(window.upper / window.interval) + 2
        self._size = fft.next_fast_len(max(last - self._first + 1, 64), real=True)
        self._last = self._first + self._size - 1
        if not isinstance(levels, Transform):
            levels = _transform(window, self._size, levels, reverse, tail, mixed)
        self.transform = levels
        # one inverse FFT, and bounds on its errors
        self.losses = self.interval * (self._first + np.arange(self._size))
        self.tilted = np.roll(
            fft.irfft(self.transform.spectrum, self._size), -self._first % self._size
        )
        if not (np.isfinite(self.tilted).all() and np.isfinite(self.transform.log_moments).all()):
            raise OverflowError(BEYOND)
        # round-off of an entry: each factor has a relative error of a few eps log(size), and the
        # inverse FFT averages
        magnitude = float(np.abs(self.transform.spectrum).mean()) + 1 / self._size
        relative = 8 * float(np.finfo(float).eps) * math.log2(self._size)
        self.round_off = relative * (self.transform.count + 1) * magnitude + self.transform.left_out
        self.relative_error = _STEP_ERROR * self.transform.count
        window, end, start = self.window, self.interval * self._last, self.interval * self._first
        upper, lower, self.log_scale = self.transform.log_moments[:3].tolist()
        # mass beyond the window, and tilted mass that wraps around, by Chernoff's bound
        self.above = self.wrapped = 0.0
        if self.transform.offset + self.transform.extent > self._last:
            self.above = math.exp(min(upper - window.upper_tilt * end, 0.0))
            self.wrapped += math.exp(
                min(upper - self.log_scale - (window.upper_tilt - window.tilt) * end, 0.0)
            )
        if self.transform.offset < self._first:
            self.wrapped += math.exp(
                min(lower - self.log_scale - (window.lower_tilt - window.tilt) * start, 0.0)
            )

    def step(self, pair: Pair) -> Transform:
        """The transform of another release on this grid; raises if the grid is too fine for it."""
        _require_near({pair: 1})
        losses = loss_nodes(pair, self.tail).losses
        if losses.max() - losses.min() > _WIDEST_STEP * self.interval:
            raise OverflowError(BEYOND)
        return _transform_of(pair, self.window, self._size, self.reverse, self.tail)

    def of_others(self, transform: Transform) -> Composition:
        """The composition of other releases on this grid."""
        return Composition(self.window, transform, self.reverse, self.tail)

    def wider_window(self) -> Window:
        """A wider window, from the moments of the masses on the grid."""
        window = self.window
        upper, lower, center = self.transform.log_moments[:3].tolist()
        end = (upper - center - log_outside(window.tilt)) / (window.upper_tilt - window.tilt)
        start = (lower - center - log_outside(window.tilt)) / (window.lower_tilt - window.tilt)
        width = window.upper - window.lower
        if end - start > 3 * width:
            # the moments at the outer tilts are too large: closer tilts bound the tails better
            start, end = window.lower - width / 4, window.upper + width / 4
            window = window._replace(
                lower_tilt=(window.tilt + window.lower_tilt) / 2,
                upper_tilt=(window.tilt + window.upper_tilt) / 2,
            )
        start = max(min(start, window.lower), self.interval * self.transform.offset)
        end = min(
            max(end, window.upper), self.interval * (self.transform.offset + self.transform.extent)
        )
        interval = max(window.interval, (end - start) / LARGEST_WINDOW)
        return window._replace(lower=start, upper=end, interval=interval)

    def _profile(self, tilted: Array) -> tuple[Array, Array]:
        """Mass at or above each loss, and delta there.

        delta at a loss is exp(-h) times delta at the next loss, plus (1 - exp(-h)) times the mass
        from there on: a sum of positive terms, without cancellation.
        """
        # values that underflow are far below any delta; the exponent is cut off only where delta is
        # far above 1 anyway
        mass = tilted * np.exp(np.minimum(self.log_scale - self.window.tilt * self.losses, 300.0))
        mass = np.cumsum(mass[::-1])
        share = -math.expm1(-self.interval)
        delta = signal.lfilter([0.0, share], [1.0, -math.exp(-self.interval)], mass)
        return mass[::-1], delta[::-1]

    def _share_above(self, tilted: Array, epsilon: float) -> float:
        """E (1 - e^(epsilon - L))_+ of tilted masses."""
        above = self.losses > epsilon
        losses = self.losses[above]
        scale = np.minimum(self.log_scale - self.window.tilt * losses, 600.0)
        return float(np.sum(tilted[above] * np.exp(scale) * -np.expm1(epsilon - losses)))

    def upper_delta(self, epsilon: float) -> float:
        total = self._share_above(np.maximum(self.tilted, 0.0) + self.round_off, epsilon)
        return min(total * (1 + self.relative_error) + self.transform.infinity + self.above, 1.0)

    def profile(self) -> Callable[[Array], Array]:
        """:meth:`upper_delta` at many epsilons, in the time of one. Between two grid points delta
        is linear in exp(epsilon). It is convex, so below each loss it is at most the chord to
        (0, 1), and the steepest chord counts.
        """
        tilted = (np.maximum(self.tilted, 0.0) + self.round_off) * (1 + self.relative_error)
        mass, delta = self._profile(tilted)
        error = 1 + 8 * self._size * float(np.finfo(float).eps)
        rest = self.transform.infinity + self.above
        ends = np.minimum(delta * error + rest, 1.0)
        slopes = (1 - ends) * np.exp(-np.maximum(self.losses, -700))
        best = int(np.argmax(slopes))

        def at(epsilons: Array) -> Array:
            cell = np.searchsorted(self.losses, epsilons, "right")
            inside = np.minimum(cell, len(mass) - 1)
            nearer = np.minimum(epsilons - self.losses[inside], 0.0)
            found = -np.expm1(nearer) * mass[inside] + np.exp(nearer) * delta[inside]
            found = np.where(cell == len(mass), 0.0, found * error) + rest
            # 1 - (1 - delta) exp(fall) as a sum of positive terms, without cancellation
            fall = np.minimum(epsilons - self.losses[best], 0.0)
            chord = (ends[best] * np.exp(fall) - np.expm1(fall)) * error
            found = np.where(cell == 0, 1.0, np.minimum(found, 1.0))
            return np.where(epsilons <= self.losses[best], np.minimum(chord, found), found)

        return at

    def upper_epsilon(self, delta: float) -> float:
        rest = delta - self.transform.infinity - self.above
        if rest <= 0:
            return math.inf
        tilted = (np.maximum(self.tilted, 0.0) + self.round_off) * (1 + self.relative_error)
        mass, found = self._profile(tilted)
        # delta falls, so the first grid point with delta <= rest ends the cell of the solution; in
        # the cell delta is linear in exp(epsilon)
        cell = int(np.argmax(found <= rest))
        solution = float(self.losses[cell])
        if cell > 0 and mass[cell] > rest:
            solution -= math.log1p((rest - found[cell]) / (mass[cell] - rest))
            solution = max(solution, float(self.losses[cell - 1]))
        solution = max(solution, 0.0)
        margin = 1e-14 * solution + 1e-10 * self.interval
        while self.upper_delta(solution) > delta:
            solution, margin = solution + margin, 2 * margin
        return solution

    def share_of_round_off(self, epsilon: float) -> float:
        """The round-off error of delta at ``epsilon``, divided by delta."""
        error = np.full(self._size, self.round_off)
        return self._share_above(error, epsilon) / max(self.upper_delta(epsilon), 1e-300)

    def excess_of_grid(self, epsilon: float) -> float:
        """About the relative excess of ``epsilon``: log(delta) falls by s there, and variance v
        that the grid adds raises it by s (1 + s) v / 2, and the cumulant likewise at the tilt.
        """
        near, far = (max(self.upper_delta(at * epsilon), 1e-300) for at in (1.0, 1.01))
        fall, tilt = math.log(near / far) / (0.01 * epsilon), self.window.tilt
        _, _, on_grid, exact = self.transform.log_moments.tolist()
        return float(on_grid - exact) * (1 + fall) / (tilt * (1 + tilt) * epsilon)

    def lower_epsilon(self, delta: float) -> float:
        count = self.transform.count
        # probability that the discretisation moves the loss by more than ``shift``
        slip = delta / 50
        ratio = self.interval / -math.expm1(-self.interval)
        mean = ratio - 1 - math.log(ratio)
        shift = count * mean + self.interval * math.sqrt(count * -math.log(slip) / 2)
        seen = np.maximum(self.tilted - self.round_off, 0.0) * (1 - self.relative_error)
        found = self._profile(seen)[1] * (1 - 1e-8)
        scale = np.minimum(self.log_scale - self.window.tilt * self.losses, 700.0)
        found -= np.exp(scale) * self.wrapped
        enough = np.flatnonzero(found >= delta + slip + 2 * self.tail * count)
        return max(float(self.losses[enough[-1]]) - shift, 0.0) if len(enough) else 0.0


def _require_near(levels: Mapping[Pair, int]) -> None:
    """Raise if one loss is too large for any useful guarantee."""
    for pair in levels:
        if _FAR_LOSS < largest_loss(pair) < math.inf:
            raise OverflowError(BEYOND)
        if isinstance(pair, Gaussian) and pair.mu > _FAR_MU:
            raise OverflowError(BEYOND)


def tail_of(delta: float, total: int) -> float:
    """The mass of each of ``total`` releases that may be moved upwards."""
    return max(1e-7 * delta / total, 1e-280)


def compose(
    levels: Mapping[Pair, int],
    reverse: bool,
    *,
    delta: float | None = None,
    epsilon: float | None = None,
    accuracy: float = ACCURACY,
    mixed: bool = True,
    is_pilot: bool = False,
    finest: float = 0.0,
    fineness: float = 1.0,
) -> Composition:
    """Composes the levels, or the reverse of each.

    Args:
        delta, epsilon: the result is tight near these; with both, similar releases can be added.
        accuracy: target for the relative excess of epsilon by the discretisation.
        mixed: whether mixtures may replace many different levels (only for upper bounds).
        is_pilot: a very wide window gets a coarse grid, because another composition may follow.
        finest: the smallest interval.
        fineness: the factor by which cells are narrower than for ``accuracy``.
    """
    _require_near(levels)
    total, grows = sum(levels.values()), delta is not None and epsilon is not None
    wanted, tail = delta, tail_of(SMALLEST if delta is None else delta, total)
    for _ in range(_ATTEMPTS):
        window = choose_window(
            levels,
            reverse,
            tail,
            epsilon=epsilon,
            log_delta=None if wanted is None else math.log(wanted),
            accuracy=accuracy,
            grows=grows,
            fineness=fineness,
        )
        width, interval = window.upper - window.lower, window.interval
        if wanted is None:
            tail = tail_of(max(math.exp(window.near.log_delta), SMALLEST), total)
            interval = max(interval, width / _ROUGH_SIZE)
        interval = max(interval, finest)
        if is_pilot and width / interval > _WIDE_PILOT:
            interval = width / _PILOT_SIZE
        window = window._replace(interval=interval)
        composition = Composition(window, levels, reverse, tail, mixed)
        if epsilon is None or grows:
            break
        # if few releases decide, the first guess of delta is far too high
        found = max(composition.upper_delta(epsilon), SMALLEST)
        is_close = wanted is not None or interval <= window.wanted_interval
        if tail <= 100 * tail_of(found, total) and is_close:
            break
        wanted, tail = found, tail_of(found, total)
    for _ in range(_ATTEMPTS):
        if composition.wrapped <= 100 * math.exp(log_outside(composition.window.tilt)):
            break
        composition = Composition(composition.wider_window(), levels, reverse, tail, mixed)
    return composition
