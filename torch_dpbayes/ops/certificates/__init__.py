"""Certificates: how private one posterior draw is, with all constants, and how it is drawn."""

from .bounded import Bounded
from .certificate import Certificate, Setting, Statement
from .finite_run_langevin import FiniteRunLangevin
from .renyi_close import RenyiClose
from .strongly_log_concave import StronglyLogConcave
from .total_variation_close import TotalVariationClose

__all__ = [
    "Bounded",
    "Certificate",
    "FiniteRunLangevin",
    "RenyiClose",
    "Setting",
    "Statement",
    "StronglyLogConcave",
    "TotalVariationClose",
]
