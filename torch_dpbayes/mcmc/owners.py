"""Whose records a chain runs over: those of one owner, here; those of several, in
:mod:`~torch_dpbayes.mcmc.many_owners`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from ..accounting.accountant import PrivacyAccountant
from ..accounting.events import DpEvent
from ..density import Model, Prior, RecordDensity
from ..noise import GaussianNoise, can_hide


class ChainStart(NamedTuple):
    """What a kernel has set up before a chain begins.

    Attributes:
        prior: θ's coordinates and log prior.
        theta: where this owner would start.
        is_given: whether the user said so.
        is_possible: whether a chain can start at a θ, whatever the data are.
        settings: public, of this run.
    """

    prior: Prior
    theta: Tensor
    is_given: bool
    is_possible: Callable[[Tensor], bool]
    settings: dict[str, Any]


class SoleOwner:
    """The owner of all records, who asks nobody. A kernel calls these methods where several
    owners have to agree, or to add up what each of them has.
    """

    def density(
        self, model: Model, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any
    ) -> RecordDensity:
        """The record terms of the data."""
        return RecordDensity(model, args, kwargs, **options)

    def agreed_start(self, set_up: Callable[[], ChainStart]) -> ChainStart:
        """How the chain starts, after ``set_up()``."""
        return set_up()

    def in_iteration(self, iteration: int) -> AbstractContextManager[None]:
        """Around everything that an iteration does."""
        return nullcontext()

    def public_numbers(self, own: GaussianNoise, iteration: int, stage: int) -> GaussianNoise:
        """Where proposals, momenta and thresholds come from, which hide nothing; ``stage`` 0 as a
        chain begins, 1 in the iteration, 2 in the free move after it.
        """
        return own

    def agreed_point(
        self,
        theta: Tensor,
        accepted: int,
        charges: Callable[[], list[tuple[DpEvent, int]]],
        accountant: PrivacyAccountant,
    ) -> Tensor:
        """Where an iteration begins, once all can pay ``charges()`` for it."""
        return theta

    def gradient_sum(self, own: Callable[[], Tensor], read: Tensor) -> Tensor:
        """The noisy sum of gradients over all owners' records; ``own()`` is this one's,
        with an entry for each of ``read``.
        """
        return own()

    def can_hide_ratio(self, bound: float, multiplier: float) -> bool:
        """Whether noise of ``multiplier`` · ``bound`` hides what one record does to the log ratio.
        Where ``bound`` is 0, no record has a part in it.
        """
        return not multiplier or not bound or (can_hide(bound) and can_hide(multiplier * bound))

    def accepts(
        self, noisy_ratio: float, log_uniform: float, rest: float, bound: float, multiplier: float
    ) -> tuple[bool, float]:
        """The accept decision and the noisy log ratio that it was made on: accept iff log u <
        ratio + rest − variance/2.
        """
        return log_uniform < noisy_ratio + rest - (multiplier * bound) ** 2 / 2, noisy_ratio

    def end_iteration(self) -> None:
        """The iteration has released all that it is going to."""

    def end_chain(self, iteration: int) -> None:
        """The chain ends after ``iteration`` iterations."""
