"""Moves of a kernel: the random walk or the user's proposal of a penalty kernel, the momenta of
DP-HMC, and moves without cost of the latents outside the likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from ..accounting import events
from ..errors import ArgumentError, ArgumentTypeError
from ..noise import check_positive


class Proposal(Protocol):
    """Proposes the next point.

    Attributes:
        event: what one call of :meth:`propose` releases about the data; ``NoOpDpEvent()`` if it
            does not use the data. It is charged before the call.
    """

    @property
    def event(self) -> events.DpEvent: ...

    def propose(self, params: dict[str, Tensor]) -> tuple[dict[str, Tensor], float]:
        """θ' by site, in unconstrained space, and log q(θ | θ') − log q(θ' | θ). ``event`` must
        cover all that they reveal about the records.
        """
        ...


class Moves:
    """How a kernel moves the coordinates that records read: by Gaussian vectors. ``factor`` has
    their standard deviations (dimension,), or is the lower triangular factor (dimension, dimension)
    of their covariance; ``argument`` names it. ``scale`` is the scale before warm-up adapts it.
    """

    proposal: Proposal | None = None

    def __init__(self, argument: str, scale: float, factor: Tensor | None) -> None:
        self._argument, self.scale, self._factor = argument, scale, factor

    def require_dimension(self, dimension: int) -> None:
        """Refuse a factor for another number of coordinates."""
        if self._factor is not None and len(self._factor) != dimension:
            raise ArgumentError(
                f"{self._argument} has {len(self._factor)} coordinates, but records read"
                f" {dimension} unconstrained coordinates of the model."
            )

    def vector(self, standard: Tensor) -> Tensor:
        """The Gaussian vector, from a standard Gaussian one."""
        if self._factor is None:
            return standard
        factor = self._factor.to(standard)
        return factor * standard if factor.dim() == 1 else factor @ standard


class RandomWalk(Moves):
    """A Gaussian random walk with a public covariance, or the user's proposal in its place: exactly
    one of them is given.
    """

    def __init__(self, proposal_scale: float | Tensor | None, proposal: Proposal | None) -> None:
        if (proposal is None) == (proposal_scale is None):
            raise ArgumentError(
                "pass either proposal_scale, the standard deviation of a random walk in"
                " unconstrained space, or proposal=."
            )
        event = getattr(proposal, "event", None)
        if proposal is not None and not isinstance(event, events.DpEvent):
            raise ArgumentTypeError(
                "proposal needs an attribute event, the DpEvent of a call: NoOpDpEvent() if it"
                " does not use the data."
            )
        self.proposal = proposal
        scale, factor = math.nan, None
        if isinstance(proposal_scale, Tensor):
            factor = _checked("proposal_scale", proposal_scale)
            if factor.dim() == 2 and not torch.equal(factor, factor.tril()):
                raise ArgumentError(
                    "proposal_scale as a matrix is the lower Cholesky factor of the covariance:"
                    " torch.linalg.cholesky(covariance)."
                )
            scale = float(torch.linalg.vector_norm(factor)) / math.sqrt(len(factor))
        elif proposal_scale is not None:
            scale = check_positive(
                "proposal_scale", proposal_scale, "a standard deviation in unconstrained space"
            )
        super().__init__("proposal_scale", scale, factor)

    def step(self, standard: Tensor) -> Tensor:
        """A step of the random walk from a standard Gaussian vector."""
        return self.scale * standard if self._factor is None else self.vector(standard)


class Mass(Moves):
    """Momenta p ~ N(0, M) of trajectories. ``mass_matrix`` None: M is the identity."""

    def __init__(self, step_size: float, mass_matrix: Tensor | None) -> None:
        scale = check_positive("step_size", step_size, "of the leapfrog integrator")
        factor = None if mass_matrix is None else _checked("mass_matrix", mass_matrix)
        if factor is not None and factor.dim() == 1:
            factor = factor.sqrt()
        elif factor is not None:
            matrix = factor
            factor, failed = torch.linalg.cholesky_ex(matrix)
            if int(failed) or not torch.allclose(matrix, matrix.T, rtol=1e-5):
                raise ArgumentError("mass_matrix must be symmetric and positive definite.")
        super().__init__("mass_matrix", scale, factor)

    def velocity(self, momentum: Tensor) -> Tensor:
        """M⁻¹p."""
        if self._factor is None:
            return momentum
        factor = self._factor.to(momentum)
        if factor.dim() == 1:
            return momentum / factor**2
        return torch.cholesky_solve(momentum[:, None], factor)[:, 0]

    def kinetic_energy(self, momentum: Tensor) -> float:
        """p·M⁻¹p/2."""
        return 0.5 * float((momentum.double() * self.velocity(momentum.double())).sum())


def _checked(argument: str, given: Tensor) -> Tensor:
    """Check a tensor's shape, and that a chain with it can reach the whole space."""
    if given.dim() not in (1, 2) or given.shape[0] != given.shape[-1] or not given.isfinite().all():
        raise ArgumentError(
            f"{argument} must be finite, of shape (dimension,) or (dimension, dimension)."
        )
    if not (given if given.dim() == 1 else given.diagonal()).gt(0).all():
        raise ArgumentError(
            f"{argument} needs positive entries (on its diagonal): otherwise the chain cannot"
            " reach the whole space."
        )
    return given.detach().clone()


# -- latents that no record reads ------------------------------------------------------------------

_DOUBLINGS = 30  # at most, of a slice's first interval
_WIDTH = 1.0  # of the first interval, in unconstrained space; any width is exact


def free_move(
    log_density: Callable[[Tensor], float],
    theta: Tensor,
    value: float,
    unread: Tensor,
    uniform: Iterator[float],
) -> tuple[Tensor, float]:
    r"""Move coordinates of θ one after another by slice sampling. p(unread | rest) ∝
    exp(``log_density``) is invariant, because the conditional law of each coordinate is.

    An interval around the coordinate is doubled until both ends lie outside the slice. Then it is
    shrunk towards the coordinate until a drawn point lies in the slice, and could have led to the
    same interval. No tuning is necessary.

    Source: Neal (2003), "Slice sampling", Figures 4 to 6.

    Args:
        log_density: a function of θ, independent of the data; ``value`` is its value at ``theta``.
        unread: indices of the coordinates.
        uniform: independent uniform numbers in (0, 1).

    Returns:
        the next θ, and its log density.
    """
    for k in unread.tolist():
        here = float(theta[k])

        def at(x: float, k: int = k, theta: Tensor = theta) -> float:
            moved = theta.clone()
            moved[k] = x
            return log_density(moved)

        level = value + math.log(next(uniform))
        low, high = _doubled(at, here, level, uniform)
        left, right = low, high
        while True:
            there = left + next(uniform) * (right - left)
            found = at(there)
            if found > level and _could_come_back(at, here, there, level, low, high):
                break
            left, right = (there, right) if there < here else (left, there)
            if not left < right:  # the slice is narrower than the spacing of floats
                there, found = here, value
                break
        theta = theta.clone()
        theta[k], value = there, found
    return theta, value


def _doubled(
    at: Callable[[float], float], here: float, level: float, uniform: Iterator[float]
) -> tuple[float, float]:
    low = here - _WIDTH * next(uniform)
    high = low + _WIDTH
    at_low, at_high = at(low), at(high)
    for _ in range(_DOUBLINGS):
        if at_low <= level and at_high <= level:
            break
        if next(uniform) < 0.5:
            low -= high - low
            at_low = at(low)
        else:
            high += high - low
            at_high = at(high)
    return low, high


def _could_come_back(
    at: Callable[[float], float], here: float, there: float, level: float, low: float, high: float
) -> bool:
    """Whether doubling from ``there`` could have led to the same interval."""
    differ = False
    while high - low > 1.1 * _WIDTH:
        middle = (low + high) / 2
        differ |= (here < middle) != (there < middle)
        low, high = (low, middle) if there < middle else (middle, high)
        if differ and at(low) <= level and at(high) <= level:
            return False
    return True
