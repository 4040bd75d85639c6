"""Differentially private Bayesian deep learning for PyTorch.

The public names are loaded on first use (PEP 562): ``import torch_dpbayes`` alone imports neither
torch nor Opacus.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# public name -> the module that defines it; "": the name is a submodule
_HOME = {
    "accounting": "",
    "audit": "",
    "errors": "",
    "frameworks": "",
    "infer": "",
    "optim": "",
    "mcmc": "",
    "metrics": "",
    "noise_aware": "",
    "ops": "",
    "DPBayesError": "errors",
    "LedgerError": "accounting.ledger",
    "PrivacyAccountant": "accounting.accountant",
    "PrivacyBudgetExceeded": "accounting.accountant",
    "get_noise_multiplier": "accounting.calibration",
    "get_num_steps": "accounting.calibration",
    "PrivacyEngine": "engine.privacy_engine",
    "PosteriorSamples": "posterior",
    "best_of_runs": "engine.tuning",
    "private_clipped_fraction": "engine.clip_norm",
    "simulate_gradient_norms": "engine.clip_norm",
}

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from . import accounting as accounting
    from . import audit as audit
    from . import errors as errors
    from . import frameworks as frameworks
    from . import infer as infer
    from . import mcmc as mcmc
    from . import metrics as metrics
    from . import noise_aware as noise_aware
    from . import ops as ops
    from . import optim as optim
    from .accounting.accountant import PrivacyAccountant as PrivacyAccountant
    from .accounting.accountant import PrivacyBudgetExceeded as PrivacyBudgetExceeded
    from .accounting.calibration import get_noise_multiplier as get_noise_multiplier
    from .accounting.calibration import get_num_steps as get_num_steps
    from .accounting.ledger import LedgerError as LedgerError
    from .engine.clip_norm import private_clipped_fraction as private_clipped_fraction
    from .engine.clip_norm import simulate_gradient_norms as simulate_gradient_norms
    from .engine.privacy_engine import PrivacyEngine as PrivacyEngine
    from .engine.tuning import best_of_runs as best_of_runs
    from .errors import DPBayesError as DPBayesError
    from .posterior import PosteriorSamples as PosteriorSamples


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        rooms = [room for room, home in _HOME.items() if not home] if name[:1].isupper() else []
        found = (r for r in rooms if name in dir(import_module(f".{r}", __name__)))
        room = next(found, None)
        where = f": write {__name__}.{room}.{name}" if room else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{where}")
    module = import_module(f".{_HOME[name] or name}", __name__)
    value = getattr(module, name) if _HOME[name] else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
