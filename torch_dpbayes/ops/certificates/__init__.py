"""What can be said about the privacy of one posterior draw, with every constant, and how the
draw is made. One certificate a file; ``certificate`` says what each has to provide.
"""

from .bounded import Bounded
from .certificate import Certificate, Setting, Statement
from .finite_run_langevin import FiniteRunLangevin, StepTooLarge
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
    "StepTooLarge",
    "StronglyLogConcave",
    "TotalVariationClose",
]
