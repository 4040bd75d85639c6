"""dp-accounting's interface, so that what was written for its accountants runs on this one."""

from __future__ import annotations

import math
from typing import Any

import dp_accounting
from dp_accounting.dp_event import ComposedDpEvent, DpEvent, SelfComposedDpEvent

from . import events
from .accountant import PrivacyAccountant
from .bounded import largest_sum
from .choices import SMALLEST_DELTA, Method
from .failures import apart, failing
from .pairs import NonPrivate, Pair, added, dominating_pair

_Details = dp_accounting.PrivacyAccountant.CompositionErrorDetails


class DpAccountingAdapter(dp_accounting.PrivacyAccountant):
    """A :class:`~torch_dpbayes.PrivacyAccountant` without a budget behind the interface of
    ``dp_accounting.PrivacyAccountant``, for its calibration of mechanisms for instance.

    Args:
        method: as for :class:`~torch_dpbayes.PrivacyAccountant`.
        neighboring_relation: ``ADD_OR_REMOVE_ONE`` or ``REPLACE_ONE``.

    **Privacy.** Numbers are upper bounds for releases whose parameters and number were fixed in
    advance. An infinite epsilon is returned where none is proved.
    """

    def __init__(
        self,
        neighboring_relation: dp_accounting.NeighboringRelation = (
            dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
        ),
        method: Method = "pld",
    ) -> None:
        super().__init__(neighboring_relation)
        self._accountant = PrivacyAccountant(neighboring=neighboring_relation, method=method)
        self._pairs: dict[Pair, int] = {}

    def _maybe_compose(self, event: DpEvent, count: int, do_compose: bool) -> Any:
        if isinstance(event, (ComposedDpEvent, SelfComposedDpEvent)):
            is_many = isinstance(event, ComposedDpEvent)
            times = count if is_many else count * event.count
            for part in event.events if is_many else [event.event]:
                if (details := self._maybe_compose(part, times, do_compose)) is not None:
                    return details
            return None
        try:
            trial = PrivacyAccountant(
                neighboring=self.neighboring_relation, method=self._accountant.method
            )
            trial.compose(event)
        except (TypeError, ValueError) as error:
            return _Details(invalid_event=event, error_message=str(error))
        if do_compose and count > 0:
            self._accountant.compose(event, count)
            for part, number in events.elementary(event, count):
                pair = dominating_pair(part, self.neighboring_relation)
                self._pairs = added(self._pairs, {pair: number})
        return None

    def get_epsilon(self, target_delta: float) -> float:
        """Epsilon at ``target_delta``, which may be 0 or 1."""
        if NonPrivate() in self._pairs:
            return math.inf
        if not self._pairs or target_delta >= 1:
            return 0.0
        if target_delta >= SMALLEST_DELTA:
            return self._accountant.get_epsilon(target_delta)
        failures, others = apart(self._pairs)
        return math.inf if failures else largest_sum(others)

    def get_delta(self, target_epsilon: float) -> float:
        """Delta at ``target_epsilon``, which may be infinite."""
        if NonPrivate() in self._pairs:
            return 1.0
        if math.isinf(target_epsilon):
            return failing(apart(self._pairs)[0])
        return self._accountant.get_delta(target_epsilon) if self._pairs else 0.0
