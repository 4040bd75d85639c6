"""The accountant behind dp_accounting's interface, so that dp_accounting's own tests run on it."""

import math

import dp_accounting
from dp_accounting.dp_event import ComposedDpEvent, SelfComposedDpEvent

from torch_dpbayes import PrivacyAccountant
from torch_dpbayes.accounting import events
from torch_dpbayes.accounting.dominating_pairs import NonPrivate, added, dominating_pair
from torch_dpbayes.accounting.events import SMALLEST_DELTA
from torch_dpbayes.accounting.privacy_loss import apart, failing, largest_sum

_Details = dp_accounting.PrivacyAccountant.CompositionErrorDetails


class DpAccountingAdapter(dp_accounting.PrivacyAccountant):
    """A ``PrivacyAccountant`` without a budget, as a ``dp_accounting.PrivacyAccountant``."""

    def __init__(
        self, neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, method="pld"
    ):
        super().__init__(neighboring_relation)
        self._accountant = PrivacyAccountant(neighboring=neighboring_relation, method=method)
        self._pairs = {}

    def _maybe_compose(self, event, count, do_compose):
        if isinstance(event, (ComposedDpEvent, SelfComposedDpEvent)):
            is_many = isinstance(event, ComposedDpEvent)
            times = count if is_many else count * event.count
            for part in event.events if is_many else [event.event]:
                if (details := self._maybe_compose(part, times, do_compose)) is not None:
                    return details
            return None
        try:
            PrivacyAccountant(
                neighboring=self.neighboring_relation, method=self._accountant.method
            ).compose(event)
        except (TypeError, ValueError) as error:
            return _Details(invalid_event=event, error_message=str(error))
        if do_compose and count > 0:
            self._accountant.compose(event, count)
            for part, number in events.elementary(event, count):
                pair = dominating_pair(part, self.neighboring_relation)
                self._pairs = added(self._pairs, {pair: number})
        return None

    def get_epsilon(self, target_delta):
        """Epsilon at ``target_delta``, which may be 0 or 1."""
        if NonPrivate() in self._pairs:
            return math.inf
        if not self._pairs or target_delta >= 1:
            return 0.0
        if target_delta >= SMALLEST_DELTA:
            return self._accountant.get_epsilon(target_delta)
        failures, others = apart(self._pairs)
        return math.inf if failures else largest_sum(others)

    def get_delta(self, target_epsilon):
        """Delta at ``target_epsilon``, which may be infinite."""
        if NonPrivate() in self._pairs:
            return 1.0
        if math.isinf(target_epsilon):
            return failing(apart(self._pairs)[0])
        return self._accountant.get_delta(target_epsilon) if self._pairs else 0.0
