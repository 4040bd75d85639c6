"""TotalVariationClose: the law of a draw is close to that of an exact one in total variation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...accounting.events import DpEvent, check_delta
from ...errors import CertificateError
from ...mcmc.checks import check_positive
from ...noise import GaussianNoise
from .. import sampling_error
from ..langevin import Sampler
from ..models import Model
from .certificate import NOTHING_CHECKED, Certificate, Setting, Statement
from .exact_draw import ExactDraw, require_exact
from .sampled_draw import SINGLE_GUARANTEE, event_of_pair, require_sampler


@dataclass(frozen=True)
class TotalVariationClose(Certificate):
    r"""A draw whose law is within total variation distance ξ of an exact draw's, on every data set
    that could occur.

    .. math::
        \|Q - P\|_{TV} \le \xi \quad \Rightarrow \quad \delta_Q(\varepsilon) \le
        \delta_P(\varepsilon) + (1 + e^\varepsilon)\,\xi

    Source: Wang, Fienberg and Smola (2015), Proposition 10.

    Args:
        target: what is known about an exact draw, and which density that is: a :class:`Bounded` or
            a :class:`StronglyLogConcave`.
        xi: ξ, asserted. It has to be far below δ: a converged chain is hardly ever known to be that
            sampling_error.
        delta: the δ of this release, public: its guarantee is one pair (ε, δ). n draws use up nδ of
            the accountant's delta.
        sampler: as for :class:`RenyiClose`. None: the No-U-Turn chain of ``target``.

    Raises:
        ValueError: a constant is out of range, or ``xi`` too large for ``delta``.

    **Privacy.** The event is ``PureDpEvent(ε)`` and ``FailureDpEvent(δ)``, with the pair of
    :meth:`single_guarantee`. Closeness is assumed; no diagnostic of it is computed, for its value
    would be a release.
    """

    target: ExactDraw
    xi: float
    delta: float
    sampler: Sampler | None = None

    def __post_init__(self) -> None:
        require_exact(self.target)
        if self.sampler is not None:
            require_sampler(self.sampler)
        check_delta(self.delta)
        check_positive("xi", self.xi)
        if 2 * self.xi >= self.delta:
            raise CertificateError(
                f"xi = {self.xi:g} must be below delta / 2 = {self.delta / 2:g}: state a larger"
                " delta, or a sampler that is closer."
            )

    def check(self, model: Model) -> None:
        self.target.check(model)

    def needs_num_data(self, model: Model) -> bool:
        return False

    def event(self, model: Model, setting: Setting) -> DpEvent:
        return event_of_pair(*self.single_guarantee(model, setting))

    def single_guarantee(self, model: Model, setting: Setting) -> tuple[float, float]:
        """(ε, δ) of one draw."""
        return (
            sampling_error.total_variation_close(
                self.target.event(model, setting), self.xi, self.delta
            ),
            self.delta,
        )

    def statement(self, model: Model, setting: Setting) -> Statement:
        proved, assumed = self.target.conditions(model, setting)
        chain = (
            f"{self.sampler!r}"
            if self.sampler
            else f"the No-U-Turn sampler after {self.target.warmup_steps} warm-up steps"
        )
        closeness = (
            f"the law of the last state of {chain} is within total variation distance {self.xi:g}"
            " of an exact draw, on every data set; "
        )
        return Statement(
            [*proved, SINGLE_GUARANTEE.format(*self.single_guarantee(model, setting))],
            [*assumed, closeness + NOTHING_CHECKED],
        )

    def draw(
        self, model: Model, data: tuple[Any, ...], setting: Setting, noise: GaussianNoise
    ) -> Tensor:
        if self.sampler is None:
            return self.target.draw(model, data, setting, noise)
        return self.sampler.draw(self.target.density(model, data, setting), noise)
