"""Random numbers that come out the same again, for the records of a batch and for each alone."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..clipping.nested import tensors_in

_OTHER_SEEDS = 2**20
FIRST_DIMENSION = [0] * 100_000  # of whatever is drawn

# each number from one place of the arguments alone, or from one row
_SAMPLERS = frozenset(
    "bernoulli binomial multinomial normal poisson native_dropout rrelu_with_noise"
    " rrelu_with_noise_ _standard_gamma _sample_dirichlet".split()
)


class SeededDraws(TorchDispatchMode):
    """Random numbers that depend on ``seed``, on the operation and on which of its calls with such
    shapes it is, on nothing else.

    Args:
        seed: of torch's generators, Python's and NumPy's.
        axes: for each draw, the dimension of the records, where known.
        are_alike: all records get the same numbers, and so do all draws.
        others: every record draws from a seed of its own, and these from other ones.
    """

    def __init__(
        self,
        seed: int = 0,
        axes: Sequence[int | None] = (),
        *,
        are_alike: bool = False,
        others: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.seed, self._axes = seed, axes
        self._are_alike, self._others = are_alike, others
        self._calls: Counter[str] = Counter()
        self.shapes: list[torch.Size] = []
        # random numbers of Python, of NumPy, or within an operation that may mix records
        self.is_elsewhere = False

    @property
    def is_random(self) -> bool:
        return bool(self.shapes) or self.is_elsewhere

    def __enter__(self) -> Any:
        random.seed(self.seed)
        numpy.random.seed(self.seed)
        self._before = _other_states()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.is_elsewhere |= self._before != _other_states()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_random(function, args, kwargs):
            return function(*args, **kwargs)
        seed = self.seed
        if not self._are_alike:
            call = repr((seed, function, [a.shape if isinstance(a, Tensor) else a for a in args]))
            self._calls[call] += 1
            seed = zlib.crc32(f"{call}{self._calls[call]}".encode())
        drawn = _drawn(seed, function, args, kwargs)
        shape = next(tensors_in(drawn)).shape
        axis = self._axes[len(self.shapes)] if len(self.shapes) < len(self._axes) else None
        self.shapes.append(shape)
        samples = function.overloadpacket.__name__ in _SAMPLERS
        is_for_each = samples or not _reads_values(function)
        self.is_elsewhere |= not is_for_each
        draws_apart = self._are_alike or self._others is not None
        # a record's values decide how many random numbers a sampler takes for it, and so where
        # those of the next record start
        if axis is None or axis >= len(shape) or not (samples or (is_for_each and draws_apart)):
            return drawn
        one = [*shape[:axis], 1, *shape[axis + 1 :]]
        for k in range(shape[axis]):
            parts = [
                (
                    a.narrow(axis, k, 1)
                    if isinstance(a, Tensor)
                    and a.dim() == len(shape)
                    and a.shape[axis] == shape[axis]
                    else one
                    if isinstance(a, list) and a == list(shape)
                    else a
                )
                for a in args
            ]
            own = seed
            if not self._are_alike:
                others = self._others
                is_other = others is not None and len(others) == shape[axis] and bool(others[k])
                own += k + _OTHER_SEEDS * is_other
            part = _drawn(own, function, parts, kwargs)
            for whole, slice_ in zip(tensors_in(drawn), tensors_in(part), strict=True):
                if whole.shape == shape and list(slice_.shape) == one:
                    whole.narrow(axis, k, 1).copy_(slice_)
        return drawn


def _is_random(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether the operation draws random numbers; fused attention does with dropout only."""
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return False
    for place, a in enumerate(function._schema.arguments):
        if a.name == "dropout_p":
            return bool(args[place] if len(args) > place else kwargs.get(a.name, a.default_value))
    return True


def _reads_values(function: Any) -> bool:
    return "_like" not in function.name() and any(
        isinstance(a.type, torch.TensorType) and not (a.alias_info and a.alias_info.is_write)
        for a in function._schema.arguments
    )


def _drawn(seed: int, function: Any, args: Any, kwargs: Any) -> Any:
    generator = kwargs.get("generator")
    if generator is None:
        # torch.manual_seed notes a stack trace at every call while CUDA is not in use
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
        return function(*args, **kwargs)
    state = generator.get_state()
    try:
        generator.manual_seed(seed)
        return function(*args, **kwargs)
    finally:
        generator.set_state(state)


def _other_states() -> tuple[Any, ...]:
    """Where the generators of Python and NumPy stand."""
    state: Any = numpy.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2:]


@contextmanager
def generators_left_as_found(devices: Sequence[torch.device]) -> Iterator[None]:
    """Torch's generators, those of ``devices`` among them, Python's and NumPy's."""
    python, arrays = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)
