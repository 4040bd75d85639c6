"""Models that are recorded once, which is most of what a short run takes."""

from functools import cache, partial

import pytest
import torch
from torch import Tensor

from torch_dpbayes.density import RecordDensity, prior_without_data

_made = {}


@cache
def _prior(model, dtype):
    return prior_without_data(model)


def prior_recorded_once(model):
    return _prior(model, torch.get_default_dtype())


def record_once(patch, *modules, for_any_count=False):
    """What ``modules`` record of a model serves for all records of the same shapes, or of rows of
    the same shapes, in all tests of this process.
    """

    def density(model, args=(), kwargs=None, **options):
        if kwargs or not all(isinstance(arg, Tensor) for arg in args):
            return RecordDensity(model, args, kwargs, **options)
        shapes = [(arg.shape[for_any_count:], arg.dtype) for arg in args]
        # two partial functions differ as objects
        own = (model.func, str(model)) if isinstance(model, partial) else model
        key = own, str(shapes), str(options), torch.get_default_dtype(), for_any_count
        if key not in _made:
            _made[key] = RecordDensity(model, args, **options)
        dims = _made[key].arguments.row_dims.items()
        return _made[key].with_rows([args[k].movedim(dim, 0) for k, dim in dims])

    for module in modules:
        if hasattr(module, "prior_without_data"):
            patch.setattr(module, "prior_without_data", prior_recorded_once)
        else:
            patch.setattr(module, "RecordDensity", density)


def recorded_once(*modules):
    """A fixture for all tests of a file."""

    @pytest.fixture(scope="module", autouse=True)
    def recorded():
        with pytest.MonkeyPatch.context() as patch:
            record_once(patch, *modules)
            yield

    return recorded
