"""How a device computes norms and sums: chunk sizes, types, and which operations are cheap.

A record's norm must be that of the term which is added up. If per-record gradients are kept and
summed, this holds by construction: the gradients may be rounded as the layer's own gradients are
(bfloat16 under autocast, TensorFloat-32 if the user allows it), and norms are computed from the
rounded gradients. If a second product computes the sum, both products use the same numbers, and the
norm includes a bound of the sum's rounding error.
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
    """The speed of a device. Choices depend only on it and on shapes, never on the load of the
    machine, so that a run repeats bit for bit. CPU times were fitted by hand to single layers on
    one core (AMD EPYC 9005, torch 2.15). GPU times are from the ratio of arithmetic to memory speed
    of H100, A100 and T4, which agree within a factor of two, and from grouped convolutions on an
    H200.

    Attributes:
        piece: the size of the pieces in which a large temporary is computed, in numbers.
        is_accelerator: whether launches and memory cost more than multiply-adds.
        has_double: whether products of float64 are about as fast as those of float32.
        unfold, write: the time to unfold a number, or to write it to new memory and read it, in
            multiply-adds of a float32 matrix product.
        grouped, group: in this unit, the time of a multiply-add in a convolution whose groups are
            records, and of a weight in it.
        gram: in this unit, the time of a multiply-add in float64.
    """

    piece: int
    is_accelerator: bool
    has_double: bool
    unfold: float = 100.0
    write: float = 80.0
    grouped: float = 1.4
    group: float = 300.0
    gram: float = 2.0


_CACHE = 2**20  # numbers: about the size of a CPU's cache
# A temporary of float32 uses 1/512 of an accelerator's memory: 31 MiB of 16 GiB, 278 of 139.
_SHARE = 512 * 4
# Compute capabilities whose float64 is at least half as fast as float32: P100, V100, A100, H100,
# B200. All others have 1/32 or 1/64 of it.
_DOUBLE = frozenset(((6, 0), (7, 0), (8, 0), (9, 0), (10, 0)))
_SMALLEST = 2**22  # numbers: the smallest piece on an accelerator
_LONG = 4096  # numbers: the error of their float32 norm is a few units of 2⁻²⁴


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


def pieces(numbers: int, *tensors: Tensor, is_small: bool = False) -> Iterator[tuple[Tensor, ...]]:
    """Some records of all these tensors at a time: about one piece. ``numbers`` is the size of one
    record. ``is_small``: on a CPU, a piece that stays in a core's own cache.
    """
    n, machine = tensors[0].shape[0], machine_of(tensors[0].device)
    piece = machine.piece // 4 if is_small and not machine.is_accelerator else machine.piece
    step = max(1, piece // numbers if numbers else n)
    if step >= n:
        return iter((tensors,))
    return zip(*(t.split(step) for t in tensors), strict=True)


@functools.lru_cache(1024)
def constant(value: float, dtype: torch.dtype) -> Tensor:
    """A number as a tensor on the CPU, which makes operations three times faster on any device."""
    return torch.tensor(value, dtype=dtype, device="cpu")


def wide(t: Tensor) -> torch.dtype:
    """The type of norms and sums: float64 if ``t`` is float64, else float32."""
    return torch.float64 if t.dtype == torch.float64 else torch.float32


# -- products --------------------------------------------------------------------------------------


def product(a: Tensor, b: Tensor) -> Tensor:
    """a·b of bfloat16 matrices. Products are exact in float32, and sums are in float32."""
    if not a.is_cuda:
        return a.float() @ b.float()
    multiply: Any = torch.mm
    found: Tensor = multiply(a, b, out_dtype=torch.float32)
    return found


def split(t: Tensor) -> tuple[Tensor, Tensor]:
    """Two numbers of bfloat16 whose sum is ``t`` up to a relative error of 2⁻¹⁸, 2⁻⁹ each."""
    high = t.bfloat16()
    return high, (t - high).bfloat16()


def is_split(t: Tensor) -> bool:
    """Whether products with these numbers are computed from several bfloat16 products."""
    return t.dtype == torch.bfloat16 and machine_of(t.device).is_accelerator


LOST_IN_SPLIT = 2.0**-17  # above the relative error of two bfloat16 terms, which is 2⁻⁹·2⁻⁹
_TF32_MASK = -(2**13)  # keeps 10 of the 23 bits of a float32's fraction


def cut(t: Tensor) -> Tensor:
    """Truncate fractions to 10 bits, which products in TensorFloat-32 use without rounding."""
    return t.contiguous().view(torch.int32).bitwise_and(_TF32_MASK).view(torch.float32)


# -- precision -------------------------------------------------------------------------------------

# float32 products that torch may compute in TensorFloat-32 or bfloat16, by device. Torch's
# properties for these settings are slow, so they are not used.
_PRODUCTS = {
    "cpu": (("mkldnn", "matmul"), ("mkldnn", "conv")),
    "cuda": (("cuda", "matmul"), ("cuda", "conv")),
}
_FULL, _AS_IT_IS = frozenset(("ieee", "none")), nullcontext()
_precision_of: Any = torch._C._get_fp32_precision_getter
_set_precision_of: Any = torch._C._set_fp32_precision_setter

# The settings that :func:`full_precision` found, innermost last; like torch's, they are global.
_found: list[dict[tuple[str, str], Any]] = []


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Switch off autocast and reduced products: they would round norms and sums differently."""
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
    """Compute float32 products and convolutions in TensorFloat-32, if the device has it."""
    return _precision("cuda", is_full=False) if device.type == "cuda" else _AS_IT_IS


@contextmanager
def _precision(kind: str, *, is_full: bool) -> Iterator[None]:
    """Inside, full precision without autocast, or TensorFloat-32, on this kind of device."""
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


def row_norms(rows: Tensor) -> Tensor:
    """Norms of the rows of a matrix, float32 or better. Long rows are cut into pieces: torch's own
    error grows with their length, and the norm of a million numbers is 2e-5 too small.
    """
    # dtype= takes as long as all else for small matrices
    dtype = None if rows.dtype in (torch.float32, torch.float64) else torch.float32
    count = rows.shape[1] // _LONG
    if count < 2:
        return torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
    pieces = rows[:, : count * _LONG].view(rows.shape[0], count, _LONG)
    rest = torch.linalg.vector_norm(rows[:, count * _LONG :], dim=1, keepdim=True, dtype=dtype)
    norms = torch.linalg.vector_norm(pieces, dim=2, dtype=dtype)
    return row_norms(torch.cat([norms, rest], 1))


def joined(norms: list[Tensor]) -> Tensor:
    """The norms of vectors whose parts have these norms."""
    if len(norms) == 1:
        return norms[0]
    # stack() converts to the widest type
    return torch.linalg.vector_norm(torch.stack(norms), dim=0)
