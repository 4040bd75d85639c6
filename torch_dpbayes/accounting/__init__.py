"""What a release costs and what is left: events, accountant, calibration."""

from . import allocation, mechanisms, selection  # noqa: F401  (for their events)
from .accountant import Charge, EpsilonBounds, PrivacyAccountant, PrivacyBudgetExceeded
from .adapter import DpAccountingAdapter
from .calibration import get_noise_multiplier, get_num_steps, noise_multiplier_for
from .ledger import LedgerError
from .risk import Risk

__all__ = [
    "Charge",
    "DpAccountingAdapter",
    "EpsilonBounds",
    "LedgerError",
    "PrivacyAccountant",
    "PrivacyBudgetExceeded",
    "Risk",
    "get_noise_multiplier",
    "get_num_steps",
    "noise_multiplier_for",
]
