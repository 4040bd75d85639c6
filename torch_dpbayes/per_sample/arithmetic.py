"""How a device computes norms and sums: chunk sizes, types, and which operations are cheap.

A record's norm must hold for what is added up. Where a sum is made of per-record gradients that are
kept, it does by construction: they may be rounded as the layer's own gradients are (bfloat16 under
autocast, TensorFloat-32 where the user allows it), for their norms are of what was rounded. Where a
second product makes the sum, both are made of the same numbers, and what the sum's rounding may add
is added to the norm.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Machine(NamedTuple):
    """The speed of a device. Choices depend on it and on shapes alone, never on what other programs
    leave free, so that a run repeats bit for bit. Times of a CPU were fitted by hand to single
    layers on one core (AMD EPYC 9005, torch 2.15); those of a GPU are by the ratio of arithmetic to
    memory of H100, A100 and T4, which agree within a factor of two, and by grouped convolutions on
    an H200.

    Attributes:
        piece: numbers in a temporary that is worked off in pieces.
        is_accelerator: whether launches and memory cost more than multiply-adds.
        has_double: whether products of float64 are about as fast as those of float32.
        unfold, write: times of a number that is unfolded, or written to fresh memory and read, in
            multiply-adds of float32 in a matrix product.
        grouped, group: the same of a multiply-add in a convolution whose groups are records, and of
            a weight in it.
        gram: of a multiply-add in float64.
    """

    piece: int
    is_accelerator: bool
    has_double: bool
    unfold: float = 100.0
    write: float = 80.0
    grouped: float = 1.4
    group: float = 300.0
    gram: float = 2.0


_CACHE = 2**20  # numbers: about what stays in a CPU's cache
# Of an accelerator's memory, a temporary of float32 takes 1/512: 31 MiB of 16 GiB, 278 of 139.
_SHARE = 512 * 4
# Compute capabilities whose float64 is at least half as fast as float32: P100, V100, A100, H100,
# B200. All others have 1/32 or 1/64 of it.
_DOUBLE = frozenset(((6, 0), (7, 0), (8, 0), (9, 0), (10, 0)))
_SMALLEST = 2**22  # numbers in a piece of an accelerator


@functools.lru_cache(64)
def machine_of(device: torch.device) -> Machine:
    """The known properties of a device."""
    if device.type == "cpu":
        return Machine(_CACHE, False, True, 23.0, 45.5, 0.55, 91.0, 2.0)
    if device.type != "cuda":
        return Machine(2**24, is_accelerator=True, has_double=device.type == "xpu")
    card = torch.cuda.get_device_properties(device)
    has_double = bool(torch.version.hip) or (card.major, card.minor) in _DOUBLE
    return Machine(max(_SMALLEST, card.total_memory // _SHARE), True, has_double)


def pieces(numbers: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some records of all these tensors at a time: about a piece, if one record has so many
    numbers.
    """
    n = tensors[0].shape[0]
    step = max(1, machine_of(tensors[0].device).piece // numbers if numbers else n)
    if step >= n > 0:
        yield tensors
        return
    for start in range(0, n, step):
        yield tuple(t[start : start + step] for t in tensors)


@functools.lru_cache(1024)
def constant(value: float, dtype: torch.dtype) -> Tensor:
    """A number as a tensor, which operations take three times faster, on any device."""
    return torch.tensor(value, dtype=dtype, device="cpu")


def wide(t: Tensor) -> torch.dtype:
    """The type of norms and of sums: float32, or float64 where the numbers are."""
    return torch.float64 if t.dtype == torch.float64 else torch.float32


# -- products --------------------------------------------------------------------------------------


def product(a: Tensor, b: Tensor) -> Tensor:
    """a·b of matrices of bfloat16, whose products are exact in float32, where they are added up."""
    if not a.is_cuda:
        return a.float() @ b.float()
    multiply: Any = torch.mm
    found: Tensor = multiply(a, b, out_dtype=torch.float32)
    return found


def split(t: Tensor) -> tuple[Tensor, Tensor]:
    """Two numbers of bfloat16 that add up to ``t`` but for 2⁻¹⁸ of it, 2⁻⁹ each time."""
    high = t.bfloat16()
    return high, (t - high).bfloat16()


def is_split(t: Tensor) -> bool:
    """Whether products with these numbers are made of several of bfloat16."""
    return t.dtype == torch.bfloat16 and machine_of(t.device).is_accelerator


LOST_IN_SPLIT = 2.0**-17  # more than the part of a number that is lost in two terms, 2⁻⁹ twice
_TF32_MASK = -(2**13)  # of the 23 bits of a float32's fraction it keeps ten


def cut(t: Tensor) -> Tensor:
    """The ten leading bits of the fractions, which products of TensorFloat-32 take as they are."""
    return t.contiguous().view(torch.int32).bitwise_and(_TF32_MASK).view(torch.float32)


# -- precision -------------------------------------------------------------------------------------

# Products of float32 that torch may compute in TensorFloat-32 or bfloat16, by device. Read without
# the properties, which are slow.
_PRODUCTS = {
    "cpu": (("mkldnn", "matmul"), ("mkldnn", "conv")),
    "cuda": (("cuda", "matmul"), ("cuda", "conv")),
}
_FULL, _AS_IT_IS = frozenset(("ieee", "none")), nullcontext()
_precision_of: Any = torch._C._get_fp32_precision_getter
_set_precision_of: Any = torch._C._set_fp32_precision_setter

# What :func:`full_precision` found, innermost last; the settings are the process' own, too.
_found: list[dict[tuple[str, str], Any]] = []


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Neither autocast nor reduced products: norms and sums would differ by their rounding."""
    kind = device.type
    precisions = starmap(_precision_of, _PRODUCTS.get(kind, ()))
    if _FULL.issuperset(precisions) and not torch.is_autocast_enabled(kind):
        return _AS_IT_IS
    return _precision(kind, is_full=True)


def allows_tf32(device: torch.device) -> bool:
    """Whether the user lets convolutions on this device round to TensorFloat-32."""
    if device.type != "cuda":
        return False
    of = ("cuda", "conv")
    return (_found[-1][of] if _found and of in _found[-1] else _precision_of(*of)) not in _FULL


def tf32(device: torch.device) -> AbstractContextManager[Any]:
    """Products and convolutions of float32 in TensorFloat-32, where the device has it."""
    return _precision("cuda", is_full=False) if device.type == "cuda" else _AS_IT_IS


@contextmanager
def _precision(kind: str, *, is_full: bool) -> Iterator[None]:
    """Full precision without autocast, or TensorFloat-32, on this kind of device until the end."""
    before = {of: _precision_of(*of) for of in _PRODUCTS.get(kind, ())}
    if is_full:
        _found.append(before)
    for of in before:
        _set_precision_of(*of, "ieee" if is_full else "tf32")
    try:
        with torch.autocast(kind, enabled=False) if is_full else _AS_IT_IS:
            yield
    finally:
        for of, value in before.items():
            _set_precision_of(*of, value)
        if is_full:
            _found.pop()


def joined(norms: list[Tensor]) -> Tensor:
    """The norms of vectors of which parts have these."""
    if len(norms) == 1:
        return norms[0]
    # of several types the widest
    return torch.linalg.vector_norm(torch.stack(norms), dim=0)
