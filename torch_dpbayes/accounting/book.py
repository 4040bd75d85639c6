"""Where pickles of earlier versions find the exception."""

from .history import PrivacyBudgetExceeded

__all__ = ["PrivacyBudgetExceeded"]
