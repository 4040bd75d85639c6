"""Which decisions does a model take from a whole batch, and what do they decide?

A branch that made-up records do not bring about is not tested by running the model on them. Here a
forward or backward pass is watched for what Python, or a tensor of a single truth value, takes from
tensors made of the batch. Each such place can be given another outcome. The constants in the code
that ran are collected as well, for thresholds are among them.
"""

from __future__ import annotations

import inspect
import linecache
import math
import os
import sys
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import opacus
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..clipping.nested import tensors_in

Outcome = bool | float

# a number that decides how often something is done, or how large something is made
LARGEST_COUNT = 4096
_LONGEST_LIST = 1024
_MOST_CONSTANTS = 32
_MOST_NUMBERS = 10  # constants that are put in the place of a number
_EXTRA_CALLS = 32  # of a place that is forced, in one pass, beyond those that were seen
_EXTRA_OPERATIONS = 20  # times as many as were seen
_FOLDERS = tuple(
    os.path.dirname(os.path.abspath(str(file))) + os.sep
    for file in (torch.__file__, opacus.__file__)
)
_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_STANDARD = os.path.dirname(os.path.abspath(str(os.__file__))) + os.sep


class EndlessError(Exception):
    """A forced outcome keeps the model going."""


@dataclass(frozen=True)
class Place:
    """Where a decision is taken: a line of the caller's code, and which expression in it.

    Attributes:
        file, line, columns: where; the number of the instruction would change when Python
            specialises code that runs often.
        is_number: a number is taken out of the batch there, not a truth value.
        operand: which one of a truth value that is made of two; None: it is not.
    """

    file: str
    line: int
    columns: tuple[int | None, ...]
    is_number: bool
    operand: int | None = None

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.line).strip()
        where = f"{os.path.basename(self.file)}:{self.line}"
        return f"{where} ({code})" if code else where


@dataclass(frozen=True)
class Bounds:
    """How far a pass may go.

    Attributes:
        calls: of one place that are forced; later ones come out as they do.
        operations: after which a pass is ended by :class:`EndlessError`.
    """

    calls: float
    operations: float


class Decisions(TorchDispatchMode):
    """Notes the outcomes of decisions in one pass after another, and forces some of them.

    Args:
        forced: outcomes by place.
        call: only this call of each place in ``forced`` is forced, the first one being 0.
        bounds: how far a pass may go.
    """

    def __init__(
        self,
        forced: Mapping[Place, Outcome],
        *,
        call: int | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        super().__init__()
        self._forced, self._call = forced, call
        self._bounds = bounds or Bounds(math.inf, math.inf)
        self._reads = _Reads()
        self._of_batch: set[int] | None = None  # storages
        self._alive: list[Tensor] = []  # no storage of this pass is used a second time
        self.start()

    def start(self) -> None:
        """A new pass begins."""
        self.outcomes: dict[Place, list[Outcome]] = defaultdict(list)
        self.operations = 0

    def __enter__(self) -> Any:
        self._reads.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.__exit__(*error)

    @property
    def is_watching(self) -> bool:
        return self._of_batch is not None

    def watch(self, tensors: Sequence[Tensor]) -> None:
        """From now on, note only what depends on these."""
        self._of_batch = set() if self._of_batch is None else self._of_batch
        self._alive.extend(tensors)
        self._of_batch.update(map(_storage, tensors))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.operations += 1
        if self.operations > self._bounds.operations:
            raise EndlessError
        args = list(args)
        if torch.Tag.data_dependent_output in function.tags:
            value = function(*args, **kwargs)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if (isinstance(value, bool) or (is_number and self._reads.is_reading)) and (
                self._depends(args) and (place := _place(is_number)) is not None
            ):
                value = self._outcome(place, value)
            return value
        changed = {k for k, a in enumerate(args) if _is_truth_value(a) and self._depends([a])}
        is_step = _gives_truth_value(function, args)
        if changed and (not is_step or sum(isinstance(a, Tensor) for a in args) > 1):
            place = _place(False)
            for k in sorted(changed) if place is not None else ():
                assert place is not None
                value = bool(args[k])
                outcome = self._outcome(replace(place, operand=k) if is_step else place, value)
                if outcome != value:
                    self._give(args, k, outcome, function)
        result = function(*args, **kwargs)
        if self._of_batch is not None and not _reads_shapes_only(function):
            given = [*tensors_in(args), *tensors_in(kwargs)]
            if any(_storage(t) in self._of_batch for t in given):
                made = list(tensors_in(result)) if isinstance(result, (Tensor, tuple, list)) else []
                for a, t in zip(function._schema.arguments, args, strict=False):
                    if a.alias_info is not None and a.alias_info.is_write:
                        made += tensors_in(t)
                self.watch(made)
        return result

    @staticmethod
    def _give(args: list[Any], k: int, outcome: Outcome, function: Any) -> None:
        info = function._schema.arguments[k].alias_info
        if info is not None and info.is_write:
            args[k].fill_(outcome)
        else:
            args[k] = torch.full_like(args[k], outcome)

    def _depends(self, args: Sequence[Any]) -> bool:
        return self._of_batch is None or any(
            _storage(t) in self._of_batch for t in tensors_in(args)
        )

    def _outcome(self, place: Place, value: Outcome) -> Outcome:
        calls = self.outcomes[place]
        calls.append(value)
        if place not in self._forced or len(calls) > self._bounds.calls:
            return value
        if self._call is not None and len(calls) - 1 != self._call:
            return value
        outcome = self._forced[place]
        if isinstance(value, int) and not isinstance(value, bool):
            return int(outcome)
        return outcome


class _Reads(TorchFunctionMode):
    """Sees when Python takes a number out of a tensor. Where an operation does so inside, another
    number could make it leave its memory.

    ``tolist`` takes its numbers one by one, past any dispatch otherwise.
    """

    is_reading = False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function not in _READERS:
            return function(*args, **(kwargs or {}))
        self.is_reading = True
        try:
            if function is Tensor.tolist and 0 < args[0].numel() <= _LONGEST_LIST:
                return _listed(args[0])
            return function(*args, **(kwargs or {}))
        finally:
            self.is_reading = False


_READERS = (
    Tensor.item,
    Tensor.tolist,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
)


def _listed(t: Tensor) -> Any:
    return t.item() if t.dim() == 0 else [_listed(part) for part in t.unbind()]


def bounds_after(seen: Decisions) -> Bounds:
    """How far a pass may go when outcomes are forced, after one that was ``seen``."""
    calls = max((len(values) for values in seen.outcomes.values()), default=0)
    return Bounds(2 * calls + _EXTRA_CALLS, _EXTRA_OPERATIONS * (seen.operations + 100))


def _storage(t: Tensor) -> int:
    try:
        return int(t.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse
        return id(t)


def _is_truth_value(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bool and value.numel() == 1


def _gives_truth_value(function: Any, args: Sequence[Any]) -> bool:
    """A step on the way to a decision, which is none by itself."""
    name = function._schema.name.removeprefix("aten::")
    is_step = name in _STEPS or name.startswith(("logical_", "bitwise_", "__"))
    return is_step and all(t.numel() == 1 for t in tensors_in(args))


_STEPS = frozenset(
    "view squeeze unsqueeze select slice detach alias clone any all as_strided permute t transpose"
    " lift_fresh".split()
)


def _reads_shapes_only(function: Any) -> bool:
    name = function._schema.name.removeprefix("aten::")
    return bool(name.endswith("_like") or name.startswith("new_"))


def _place(is_number: bool) -> Place | None:
    """The innermost line of the caller's that runs now; None where a number is taken by a
    layer of torch's or Opacus', or no caller is there.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith((_OWN, *_MODES)):
        frame = frame.f_back
    if is_number and frame is not None and frame.f_code.co_filename.startswith(_FOLDERS):
        return None
    while frame is not None and frame.f_code.co_filename.startswith((*_FOLDERS, _OWN)):
        frame = frame.f_back
    if frame is None:
        return None
    columns = _positions(frame.f_code)[frame.f_lasti // 2]
    return Place(frame.f_code.co_filename, frame.f_lineno, columns, is_number)


@lru_cache(maxsize=256)
def _positions(code: types.CodeType) -> list[tuple[int | None, ...]]:
    return list(code.co_positions())


# what runs between an operation and the modes that see it
_MODES = tuple(
    os.path.join(_FOLDERS[0], name)
    for name in ("_ops.py", "_compile.py", "_dynamo", "overrides.py", "utils/_python_dispatch.py")
)


def _is_real_number(t: Tensor) -> bool:
    return t.numel() == 1 and not t.is_complex()


# -- constants -------------------------------------------------------------------------------------


class Constants:
    """Numbers that stand in the code which runs inside, or in the globals, arguments and
    attributes that it names.
    """

    def __init__(self) -> None:
        self._codes: set[types.CodeType] = set()
        self._numbers: set[float] = set()
        self._tensors: list[Tensor] = []  # of one number each

    @contextmanager
    def collected(self) -> Iterator[None]:
        before = sys.getprofile()
        if before is None:
            sys.setprofile(self._note)
        try:
            yield
        finally:
            if before is None:
                sys.setprofile(None)
        # not while the model runs, whose operations are watched
        self._keep([float(t) for t in self._tensors])
        self._tensors.clear()

    def _note(self, frame: types.FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code in self._codes:
            return
        self._codes.add(code)
        if code.co_filename.startswith((*_FOLDERS, _OWN, "<frozen")) or (
            code.co_filename.startswith(_STANDARD) and "site-packages" not in code.co_filename
        ):
            return
        values = list(code.co_consts)
        values += [v for v in code.co_consts if isinstance(v, (tuple, frozenset)) for v in v]
        values += [frame.f_globals.get(name) for name in code.co_names]
        values += frame.f_locals.values()
        for owner in frame.f_locals.values():
            if isinstance(owner, nn.Module):
                values += [vars(owner).get(name) for name in code.co_names]
                held = {**owner._buffers, **owner._parameters}
                tensors = (held.get(name) for name in code.co_names)
                self._tensors += [t for t in tensors if t is not None and _is_real_number(t)]
        self._keep(values)

    def _keep(self, values: Sequence[Any]) -> None:
        for value in values:
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                if math.isfinite(value) and abs(value) < 2**62 and value not in (0, 1, -1, 2):
                    self._numbers.add(abs(value))

    @property
    def numbers(self) -> list[float]:
        """Absolute values; of many the largest and the smallest."""
        return _few(sorted(self._numbers), _MOST_CONSTANTS)

    @property
    def sizes(self) -> list[int]:
        """Numbers of records that a constant may be compared with."""
        return sorted({int(n) + more for n in self.numbers if n > 2 for more in (0, 1)})


def numbers_near(values: Sequence[Outcome], constants: Sequence[float]) -> list[Outcome]:
    """Other numbers that might have been taken in place of ``values``."""
    value, few = max(values), _few(constants, _MOST_NUMBERS)
    if all(isinstance(v, int) for v in values):
        found: set[Outcome] = {value + 1, value + 7, min(values) - 1, 0, 1}
        found |= {int(c) + more for c in few for more in (0, 1) if c < LARGEST_COUNT}
        return sorted(n for n in found if n not in values)
    found = {2 * abs(value) + 1, 1e6, -1e6, 1e15, -1e15, 0.0, min(values) / 2 - 1, -value}
    found |= {math.inf, -math.inf, math.nan}
    found |= {sign * c * scale for c in few for sign, scale in ((1, 1), (1, 1.5), (-1, 1.5))}
    return sorted(float(n) for n in found if n not in values)


def _few(numbers: Sequence[float], most: int) -> list[float]:
    """Of many numbers the smallest and the largest."""
    half = most // 2
    return list(numbers) if len(numbers) <= most else [*numbers[:half], *numbers[-half:]]
