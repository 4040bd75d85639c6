"""Compute the cost of releases and the rest of a budget: events, accountant, calibration."""

from . import mechanisms, random_allocation, selection  # noqa: F401  (for their events)
from .accountant import Charge, EpsilonBounds, PrivacyAccountant, PrivacyBudgetExceeded
from .calibration import get_noise_multiplier, get_num_steps, noise_multiplier_for
from .ledger import LedgerError
from .risk import Risk

__all__ = [
    "Charge",
    "EpsilonBounds",
    "LedgerError",
    "PrivacyAccountant",
    "PrivacyBudgetExceeded",
    "Risk",
    "get_noise_multiplier",
    "get_num_steps",
    "noise_multiplier_for",
]
