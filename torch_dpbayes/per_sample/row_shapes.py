# ruff: noqa: SLF001 - of followed tensors
"""What a torch function does to a batch, by the shapes of its arguments.

A function is called on meta tensors with a prime number of records: a size of the result that the
prime divides is the dimension of the records. Then the function of a few synthetic records is
compared with that of each one as a batch of one, so that nobody gets another loss than written;
privacy does not rest on the comparison. Equal arguments are looked at once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .followed import PRIME, Followed, flatten, unflatten

_ROWS_TRIED = 3  # synthetic records
_TOLERANCE = 1e-4  # relative and absolute; a float32 reduction in another order stays below


def shapes_of(function: Any, spec: Any, leaves: list[Any]) -> tuple[list[Tensor | None], bool]:
    """Meta tensors of the results for a prime number of records, and whether the function of a
    batch is that of its records.
    """
    return _looked_at(_Signature(function, spec, leaves))


def nesting_of(function: Any, spec: Any, leaves: list[Any]) -> Any:
    """How the results of a function are nested."""
    return flatten(_on_meta_tensors(function, spec, leaves))[1]


class _Signature:
    """A function and the shapes of its arguments."""

    __slots__ = ("_key", "function", "leaves", "spec")

    def __init__(self, function: Any, spec: Any, leaves: list[Any]) -> None:
        self.function, self.spec, self.leaves = function, spec, leaves
        self._key = (function, spec, tuple(map(_described, leaves)))

    def __hash__(self) -> int:
        return hash((self.function, self._key[2]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Signature) and self._key == other._key


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Followed):
        return leaf._rows.shape[1:], leaf._dim, leaf._how, leaf._rows.dtype
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), repr(leaf)


@lru_cache(4096)
def _looked_at(signature: _Signature) -> tuple[list[Tensor | None], bool]:
    function, spec, leaves = signature.function, signature.spec, signature.leaves
    found = flatten(_on_meta_tensors(function, spec, leaves))[0]
    metas = [t if isinstance(t, Tensor) else None for t in found]
    signature.leaves = []  # the cache keeps no records
    return metas, _is_row_by_row(function, spec, leaves, metas)


def _on_meta_tensors(function: Any, spec: Any, leaves: list[Any]) -> Any:
    args, kwargs = unflatten([_on_meta(v) for v in leaves], spec)
    with torch.no_grad():
        return function(*args, **kwargs)


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
    if any(isinstance(v, Followed) and v._how == "sealed" for v in leaves):
        return False
    generator = torch.Generator().manual_seed(0)

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
        with torch.no_grad(), torch.random.fork_rng(devices=list(devices)):
            together, again = results(batch, _ROWS_TRIED), results(batch, _ROWS_TRIED)
            if not all(map(_are_equal, together, again)):
                return True  # it draws random numbers
            alone = [results({k: v[i] for k, v in made.items()}, 1) for i in range(_ROWS_TRIED)]
    except Exception:
        return True
    return all(map(_is_made_of, together, metas, zip(*alone, strict=True)))


def _are_equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or bool((a != a).any())


def _is_made_of(together: Tensor, meta: Tensor | None, rows: tuple[Tensor, ...]) -> bool:
    """Whether the result of a batch has the results of its records as rows, or is their mean or
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
