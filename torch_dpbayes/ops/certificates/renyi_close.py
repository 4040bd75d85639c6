"""RenyiClose: the law of a draw is close to that of an exact one in Rényi divergence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...accounting.events import DpEvent, check_delta
from ...errors import CertificateError
from ...noise import GaussianNoise
from .. import sampling_error
from ..langevin import Sampler
from ..models import Model
from .certificate import NOTHING_CHECKED, Certificate, Setting, Statement
from .exact_draw import ExactDraw, require_exact
from .sampled_draw import SINGLE_GUARANTEE, event_of_pair, require_sampler


@dataclass(frozen=True)
class RenyiClose(Certificate):
    r"""A draw by a sampler without an accept step, whose law is close to an exact draw's in Rényi
    divergence.

    .. math:: D_\beta(Q \| P) \le \eta \quad \text{and} \quad D_\beta(P \| Q) \le \eta

    for the law Q of the draw and the target P, on every data set that could occur. Both directions
    are needed: with the first alone Q may leave out sets that P reaches, and give the data away
    there. At order ∞ the log ratio of the densities is within ±η, and the event of an exact draw
    grows from a range b to b + 4η, or from μ to μ + 4Φ⁻¹(e^η/(1+e^η)). At a finite order there is a
    δ > 0 at every ε: see ``delta``.

    Sources: Ganesh and Talwar (2020), "Faster differentially private samplers via Rényi divergence
    analysis of discretized Langevin MCMC". Their bounds for the overdamped and the underdamped
    chain hide their constants and certify nothing by themselves.

    Args:
        target: what is known about an exact draw, and which density that is: a :class:`Bounded` or
            a :class:`StronglyLogConcave`.
        sampler: :class:`~torch_dpbayes.ops.Overdamped`, :class:`~torch_dpbayes.ops.Underdamped` or
            :class:`~torch_dpbayes.ops.NoseHoover`.
        divergence: η, asserted.
        order: β > 1, asserted.
        delta: at a finite order, the δ of this release, public: its guarantee is one pair (ε, δ). n
            draws use up nδ of the accountant's delta, so it should be a small part of that. Refused
            at order ∞, which needs none.

    Raises:
        ValueError: a constant is out of range.

    **Privacy.** At order ∞ the event is ``BoundedRangeDpEvent`` or ``MuGaussianDpEvent``; at a
    finite order it is ``PureDpEvent(ε)`` and ``FailureDpEvent(δ)``, with the pair of
    :meth:`single_guarantee`. Closeness is assumed; no diagnostic of it is computed, for its value
    would be a release.
    """

    target: ExactDraw
    sampler: Sampler
    divergence: float
    order: float = math.inf
    delta: float | None = None

    def __post_init__(self) -> None:
        require_exact(self.target)
        require_sampler(self.sampler)
        if (
            isinstance(self.divergence, bool)
            or not isinstance(self.divergence, int | float)
            or not 0 <= self.divergence < math.inf
        ):
            raise CertificateError(
                f"divergence must be finite and not negative, got {self.divergence!r}."
            )
        if (
            isinstance(self.order, bool)
            or not isinstance(self.order, int | float)
            or not self.order > 1
        ):
            raise CertificateError(
                "order must be above 1 (math.inf for a bound on the ratio of the densities), got"
                f" {self.order!r}."
            )
        if self.order == math.inf and self.delta is not None:
            raise CertificateError(
                "at order infinity the guarantee has no delta of its own: leave out delta=."
            )
        if self.order < math.inf:
            if self.delta is None:
                raise CertificateError(
                    "at a finite order the guarantee is a pair (epsilon, delta): state delta=, as"
                    " RenyiClose(..., order=50, delta=1e-6)."
                )
            check_delta(self.delta)

    def check(self, model: Model) -> None:
        self.target.check(model)

    def needs_num_data(self, model: Model) -> bool:
        return False

    def event(self, model: Model, setting: Setting) -> DpEvent:
        exact = self.target.event(model, setting)
        return (
            sampling_error.ratio_bounded(exact, self.divergence)
            if self.order == math.inf
            else event_of_pair(*self.single_guarantee(model, setting))
        )

    def single_guarantee(self, model: Model, setting: Setting) -> tuple[float, float]:
        """(ε, δ) of one draw at a finite order."""
        if self.delta is None:
            raise CertificateError("at order infinity there is no pair: the guarantee is event.")
        return (
            sampling_error.renyi_close(
                self.target.event(model, setting), self.divergence, self.order, self.delta
            ),
            self.delta,
        )

    def statement(self, model: Model, setting: Setting) -> Statement:
        proved, assumed = self.target.conditions(model, setting)
        if self.order < math.inf:
            proved = [*proved, SINGLE_GUARANTEE.format(*self.single_guarantee(model, setting))]
        closeness = (
            f"the law of the last state of {self.sampler!r} is within Renyi divergence"
            f" {self.divergence:g} of order {self.order:g} of an exact draw, in both directions, on"
            f" every data set; {NOTHING_CHECKED}"
        )
        return Statement(proved, [*assumed, closeness])

    def draw(
        self, model: Model, data: tuple[Any, ...], setting: Setting, noise: GaussianNoise
    ) -> Tensor:
        return self.sampler.draw(self.target.density(model, data, setting), noise)
