# ruff: noqa: SLF001 - private attributes of followed tensors
"""Classify torch functions by what they do to a batch: by name, or by the shapes of their
arguments.

A function of unknown name is called on meta tensors with a prime number of records: a size of the
result that the prime divides is the dimension of the records. Then the result for a batch of a few
synthetic records is compared with the results for each of them alone, so that no user gets another
loss than written; privacy does not rest on the comparison. Equal arguments are checked only once.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import lru_cache
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodWrapperType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .derived import LOOKS
from .followed import PRIME, Followed, flatten, unflatten
from .plain_functions import BY_ELEMENT, OF_CLASSES


def names(*texts: str) -> frozenset[str]:
    return frozenset(name for text in texts for name in text.split())


METADATA = names(
    "shape dtype device ndim layout is_cuda is_cpu is_sparse itemsize nbytes is_nested",
    "is_quantized is_meta is_mps is_xpu is_mkldnn names size dim ndimension numel nelement",
    "is_floating_point is_complex is_signed element_size get_device __len__ __hash__",
    "is_same_size is_inference is_leaf is_contiguous is_pinned retains_grad requires_grad stride",
)
NUMBERS = frozenset(f.__name__ for f in LOOKS) | {"__iter__"}
# Functions that do not compute with the values.
SPECIAL = NUMBERS | names("grad grad_fn requires_grad_ _is_all_true backward __repr__ __str__")
# Conversions to another device or type. The rows are converted, not the tensor without values.
TO_ELSEWHERE = names(
    "to cpu cuda pin_memory contiguous clone detach data float double half bfloat16 long int",
    "short char byte bool",
)
# A reduced loss may be multiplied by fixed numbers and added to others.
PRODUCTS = names("mul __mul__ __rmul__ multiply div true_divide divide __truediv__")
SUMS = names("add __add__ __radd__ sub __sub__ __rsub__ rsub subtract")
LINEAR = PRODUCTS | SUMS | names("neg __neg__ sum mean stack squeeze reshape view")
# Functions with sizes among their arguments.
SIZES = names(
    "view reshape expand new_zeros new_ones new_full new_empty unflatten broadcast_to repeat"
)
LOSSES = frozenset(
    name
    for name in dir(F)
    if name.endswith("_loss") or name.startswith("binary_cross_entropy") or name == "cross_entropy"
) | {"kl_div"}
# Losses whose mean divides by the given weights.
WEIGHTED = names("cross_entropy nll_loss mse_loss l1_loss")
# Some functions that draw no random numbers.
DRAW_NOTHING = (
    SPECIAL | LINEAR | SIZES | TO_ELSEWHERE | {f.__name__ for f in BY_ELEMENT | OF_CLASSES}
)

_NOT_IN_PLACE = names("__invert__ __index__ __int__ __iter__")

# a cache by function and shapes of arguments, and its largest size
_found: dict[Any, tuple[list[Tensor | None], bool, Any]] = {}
_MOST_KEPT = 4096
_ROWS_TRIED = 3  # synthetic records
_TOLERANCE = 1e-4  # relative and absolute; the order of a float32 reduction changes less


# Of a class, also if its metaclass computes attributes: whether it is written in Python, so that
# operators, len() or hash() may run code of the caller's.
flags_of: Any = type.__dict__["__flags__"].__get__
IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE


@lru_cache(2048)
def is_torchs(function: Any) -> bool:
    """Whether a function that torch passes to followed tensors, or to a mode, is torch's own and
    not one of the caller's, passed by ``torch.overrides``. Torch's own functions are in C++, in
    ``Tensor``, or in a torch module under their name.
    """
    if function is torch.device:  # modes receive it, too
        return True
    kind, home = type(function), str(getattr(function, "__module__", ""))
    if kind is FunctionType:  # a name can be given to any function, also to one in Tensor
        places = {torch._jit_internal, sys.modules.get(home)} - {torch.overrides, None}
        if all(vars(place) is not function.__globals__ for place in places):
            return False
    own = function.__self__ if kind is MethodWrapperType else function
    if any(own is value for base in Tensor.__mro__ for value in vars(base).values()):
        return True
    if home.partition(".")[0] != "torch" or kind is not FunctionType:
        return home.partition(".")[0] == "torch" and kind is BuiltinFunctionType
    # functions of boolean_dispatch, such as F.max_pool2d, can be found only by __name__
    for name in (function.__qualname__, function.__name__):
        with suppress(AttributeError):
            if attrgetter(name)(sys.modules[home]) is function:
                return True
    return False


def is_in_place(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a function writes into an argument."""
    return (
        (name.endswith("_") and not name.endswith("__"))
        or name.startswith("__set")
        or (name.startswith("__i") and name not in _NOT_IN_PLACE)
        or bool(kwargs.get("inplace"))
        or kwargs.get("out") is not None
    )


def shapes_of(function: Any, spec: Any, leaves: list[Any]) -> tuple[list[Tensor | None], bool, Any]:
    """Meta tensors of the results for a prime number of records, whether the result for a batch is
    made of the results for its records, and the nesting of the results.
    """
    key = function, spec, tuple(map(_described, leaves))
    if key not in _found:
        if len(_found) == _MOST_KEPT:
            _found.clear()
        args, kwargs = unflatten([_on_meta(v) for v in leaves], spec)
        with torch.no_grad():
            results, nesting = flatten(function(*args, **kwargs))
        metas = [t if isinstance(t, Tensor) else None for t in results]
        _found[key] = metas, _is_row_by_row(function, spec, leaves, metas), nesting
    return _found[key]


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Followed):
        return leaf._rows.shape[1:], leaf._dim, leaf._how, leaf._rows.dtype
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), repr(leaf)


def _on_meta(value: Any) -> Any:
    if isinstance(value, Followed):
        if value._how == "sealed":
            return value._rows
        shape = list(value._rows.shape[1:])
        if value._dim is not None:
            shape[value._dim] *= PRIME
        return torch.empty(shape, dtype=value._rows.dtype, device="meta")
    return value.to("meta") if isinstance(value, Tensor) else value


def _is_row_by_row(function: Any, spec: Any, leaves: list[Any], metas: list[Tensor | None]) -> bool:
    if any(isinstance(v, Tensor) and v.device.type == "meta" for v in leaves):
        return True
    if any(isinstance(v, Followed) and v._how is not None for v in leaves):
        return False
    generator = torch.Generator().manual_seed(0)
    # a function may write into its constants, as batch_norm does
    leaves = [v.clone() if type(v) in (Tensor, nn.Parameter) else v for v in leaves]

    def synthetic(value: Followed) -> Tensor:
        shape = (_ROWS_TRIED, *value._rows.shape[1:])
        if value._rows.is_floating_point():
            made = torch.rand(shape, generator=generator) * 0.8 + 0.1  # probabilities, too
        else:
            made = torch.randint(0, 2, shape, generator=generator)
        return made.to(value._rows.dtype).to(value._rows.device)

    made = {k: synthetic(v) for k, v in enumerate(leaves) if isinstance(v, Followed)}

    def results(values: dict[int, Tensor], records: int) -> list[Tensor]:
        new = [
            v // PRIME * records if type(v) is int and v > 0 and v % PRIME == 0 else v
            for v in leaves
        ]
        for k, v in values.items():
            new[k] = v
        args, kwargs = unflatten(new, spec)
        found = flatten(function(*args, **kwargs))[0]
        return [t.double() for t in found if isinstance(t, Tensor)]

    batch = {k: leaves[k].like(v).whole() for k, v in made.items()}
    devices = {v.device for v in made.values() if v.device.type == "cuda"}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=list(devices)), _FixedDraws():
            together = results(batch, _ROWS_TRIED)
            alone = [results({k: v[i] for k, v in made.items()}, 1) for i in range(_ROWS_TRIED)]
    except Exception:
        return True
    return all(map(_is_made_of, together, metas, zip(*alone, strict=True)))


class _FixedDraws(TorchDispatchMode):
    """Constants instead of random numbers, which would differ between a batch and its records."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            for t in flatten(found)[0]:
                if isinstance(t, Tensor):
                    t.fill_(0.5 if t.is_floating_point() else 0)
        return found


def _is_made_of(together: Tensor, meta: Tensor | None, rows: tuple[Tensor, ...]) -> bool:
    """Whether the result for a batch has the results for its records as rows, or is their mean or
    sum.
    """
    shape = () if meta is None else meta.shape
    dims = [d for d, size in enumerate(shape) if size and size % PRIME == 0]
    stacked = torch.stack(rows)
    if len(dims) == 1:
        expected = [stacked.movedim(0, dims[0]).flatten(dims[0], dims[0] + 1)]
    else:
        expected = [stacked.mean(0), stacked.sum(0)]
    return any(
        e.shape == together.shape
        and torch.allclose(together, e, _TOLERANCE, _TOLERANCE, equal_nan=True)
        for e in expected
    )
