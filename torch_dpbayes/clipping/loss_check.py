"""Does every record's output get its gradient from that record's loss alone?

A clip bound limits what one record does to *its own* gradient. A loss that divides by the batch's
class weights, or by a count of its targets, hands every record a gradient that depends on the
others, wherever it is clipped afterwards.

In an ordinary loop a finished number arrives, and nothing says how it was computed. So the outputs
of a model in training mode are tensors that note what is done with them. At backward passes 1, 2,
4, …, 64, every 64th, and whenever the loss is computed in a way not seen before, what was noted is
run again for a few records, each in a batch of one, and the gradients are compared with those that
reached the outputs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from .nested import map_tensors

_RECORDS, _RECORDS_LATER = 8, 2  # compared when a way of computing the loss is new, and later
_PERIOD = 64
_WAYS = 32  # of reading numbers that may or may not stand for the number of records
_SIGNATURES = 256

# Of a gradient's largest entry; noise that cancellation leaves comes on top.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
_FULL = {Tensor.float, Tensor.half, Tensor.bfloat16}

_SCALING = frozenset(
    "mul multiply rmul imul div divide true_divide truediv rdiv rtruediv itruediv".split()
)
_SIZED = frozenset(
    "view reshape expand repeat unflatten broadcast_to tile "
    "new_zeros new_ones new_full new_empty".split()
)
# Their arguments of fewer dimensions have the records in front; elsewhere broadcasting aligns the
# last dimensions.
_ROWS_FIRST = frozenset(
    "cross_entropy nll_loss multi_margin_loss cosine_embedding_loss ctc_loss gather take_along_dim "
    "__getitem__".split()
)
_INPLACE = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __idiv__ __itruediv__ __ipow__ __ifloordiv__ "
    "__imod__".split()
)
_OF_SEVERAL = frozenset(("topk", "kthvalue", "batch_norm"))  # which may fail on one record
_LIKE = frozenset(("rand_like", "randn_like", "randint_like"))
_RANDOM = frozenset(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout dropout_ "
    "alpha_dropout_ bernoulli bernoulli_ multinomial normal normal_ poisson gumbel_softmax rrelu "
    "rrelu_ uniform_ random_ exponential_ "
    "cauchy_ log_normal_ geometric_ scaled_dot_product_attention "
    "multi_head_attention_forward".split()
)


class LossWatch:
    """Notes what becomes of a model's outputs, and compares what comes back with single records'.

    Args:
        loss_reduction: ``"mean"`` or ``"sum"``, what the loss does over the batch.

    **Privacy.** A test, not a proof. It sees what is computed from the outputs with torch's
    functions. What is computed from the targets alone (class weights out of the batch's counts) is
    taken for a constant of the record whose row it is, and so are numbers that leave torch
    (``item()``). A loss that could not be compared is reported as not seen.
    """

    def __init__(self, loss_reduction: str) -> None:
        self.loss_reduction = loss_reduction
        self._program: _Program | None = None
        self._passes = 0
        self._known: dict[
            int, tuple[str, ...]
        ] = {}  # signatures of losses, and how their numbers are read
        self._constants: dict[
            tuple[int, int], tuple[int, float]
        ] = {}  # records and number when last seen
        self._was_compared = self._was_missed = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy takes nothing of the data along."""
        return {**self.__dict__, "_program": None}

    @property
    def state(self) -> str:
        """``"compared"``, or ``"not seen"`` unless every loss so far was run again for records."""
        return "compared" if self._was_compared and not self._was_missed else "not seen"

    def outputs(self, value: Any, n: int) -> Any:
        """The outputs of a forward pass in training mode, as they are handed to the user.

        Args:
            value: a tensor, or tensors in nested tuples, lists, mappings and dataclasses.
            n: the number of records, which are rows of every tensor.
        """
        self.forget()
        if n < 2:  # nothing to compare with
            return value
        program = self._program = _Program(n)
        return map_tensors(value, program.output)

    def forget(self) -> None:
        """The forward pass will have no backward pass."""
        if self._program is not None:
            self._program.close()
            self._program = None

    def require_each_alone(self) -> None:
        """Compare the last backward pass, if it is one of those to be compared.

        Raises:
            RuntimeError: the gradient of a record's output is not that of its own loss.
        """
        program = self._program
        if program is None:
            return
        self.forget()
        if all(gradient is None for gradient in program.arrived):
            return
        self._passes += 1
        signature = program.signature()
        ways = self._known.get(signature)
        is_due = self._passes % _PERIOD == 0 or (
            self._passes < _PERIOD and self._passes.bit_count() == 1
        )
        if ways is not None and not is_due:
            return
        if len(self._known) >= _SIGNATURES:
            self._known.clear()
        self._known[signature] = ways or ()
        count = _RECORDS if ways is None else _RECORDS_LATER
        try:
            with warnings.catch_warnings(action="ignore"):  # a standard deviation of one number
                was_compared = self._compare(program, signature, count)
        except _NotReplayed:
            was_compared = False
        if was_compared:
            self._was_compared = True
        elif was_compared is not None:
            self._was_missed = True

    def _compare(self, program: _Program, signature: int, count: int) -> bool | None:
        """True: compared. False: it could not be. None: the next batch will tell."""
        needed = program.needed()
        n, unit = program.n, program.n if self.loss_reduction == "mean" else 1
        records = sorted({(self._passes + k * n // count) % n for k in range(min(count, n))})
        numbers = _numbers(needed, n)
        options = [number.options for number in numbers]
        last = self._known[signature]
        before = [last] if len(last) == len(options) else []
        first: _Verdict | None = None
        guesses = itertools.islice(itertools.product(*options), 2**12)
        readings = [*before, *sorted(guesses, key=lambda ways: ways.count("maybe x/n"))[:_WAYS]]
        for is_wide, ways in itertools.product((False, True), readings):
            reading = {
                number.place: _read(number.value, way, n)
                for number, way in zip(numbers, ways, strict=True)
            }
            if (
                first is not None
                and not _verdict(program, needed, records[:1], unit, reading, is_wide).is_same
            ):
                continue
            verdict = _verdict(program, needed, records, unit, reading, is_wide)
            if verdict.is_same:
                self._known[signature] = tuple(ways)
                return self._is_settled(signature, numbers, ways, n)
            first = first or verdict
        if first is None or first.is_same is None:
            raise _NotReplayed
        raise RuntimeError(_explained(program, needed, first, self.loss_reduction))

    def _is_settled(
        self, signature: int, numbers: Sequence[_Number], ways: Sequence[str], n: int
    ) -> bool | None:
        """Was a number rightly taken for x/n? Two batches of different sizes tell."""
        settled: bool | None = True
        for k, (number, way) in enumerate(zip(numbers, ways, strict=True)):
            if way != "maybe x/n":
                continue
            other_n, other = self._constants.get((signature, k), (n, math.nan))
            self._constants[signature, k] = n, number.value
            if other_n != n and other == number.value:
                raise RuntimeError(
                    f"the loss is multiplied by {number.value:.6g}, whatever the number of "
                    "records: divide by it instead, as mean() over dimension 0 does."
                )
            if not (other_n != n and math.isclose(other * other_n, number.value * n, rel_tol=1e-6)):
                settled = None
        return settled


# -- noting ----------------------------------------------------------------------------------------


class _Noted(Tensor):
    """A tensor that depends on the model's outputs; until the step, operations on it are noted."""

    noted: tuple[_Program, int]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        # what a dispatch mode around the training loop calls in the backward pass is no loss
        if isinstance(func, torch._ops.OpOverload):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _AS_PLAIN:
            return _as_plain(func, args, kwargs)
        if func is Tensor.backward or func is torch.autograd.backward:
            _backward(*args, **kwargs)
            return _as_plain(func, args, kwargs)
        first = args[0] if args and type(args[0]) is _Noted else next(_noted((args, kwargs)))
        program = first.noted[0]
        program.is_lost |= func is torch.autograd.grad  # gradients accumulate where it passes
        if len(types) > 1 and any(t not in _TYPES for t in types):
            program.close()  # another library's tensors do what they do with plain ones
            program.is_lost = True
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "") == "__get__" and func in _PLAIN_PROPERTIES:
                return func(*args, **kwargs)
            op = program.begin(func, args, kwargs)
            result = func(*args, **kwargs)
            program.end(op, args, result)
        return result


_CONSTANTS = {bool, str, type(None), torch.dtype, torch.device, torch.memory_format}
_TYPES = {_Noted, Tensor, torch.nn.Parameter}
_AS_PLAIN = {Tensor.__repr__, Tensor.__format__, Tensor.__reduce_ex__, Tensor.__deepcopy__}
_PLAIN_PROPERTIES = {
    getattr(Tensor, name).__get__
    for name in "shape dtype device requires_grad grad_fn is_leaf layout ndim is_cuda".split()
}


def _as_plain(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    noted = [(t, t.noted) for t in _noted((args, kwargs))]
    try:
        for t, _ in noted:
            _make_plain(t)
        return func(*args, **kwargs)
    finally:
        for t, note in noted:
            t.__class__ = _Noted
            t.noted = note


def _backward(tensors: Any, gradients: Any = None, *_: Any, **options: Any) -> None:
    """Note where a backward pass begins."""
    tensors = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    gradients = options.get("grad_tensors", options.get("gradient", gradients))
    gradients = (
        (gradients,) * len(tensors)
        if gradients is None or isinstance(gradients, Tensor)
        else tuple(gradients)
    )
    program = next(_noted(tensors)).noted[0]
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if type(tensor) is not _Noted:
            program.is_lost = True
            continue
        if gradient is not None and gradient.dim() > 0:
            tensor, gradient = (tensor * gradient).sum(), None
        program.starts.append((tensor.noted[1], gradient))


def _noted(value: Any) -> Iterator[_Noted]:
    if type(value) is _Noted:
        yield value
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from _noted(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from _noted(v)
    elif isinstance(value, slice):
        yield from _noted((value.start, value.stop, value.step))


def _make_plain(tensor: Tensor) -> None:
    tensor.__class__ = Tensor
    del tensor.__dict__["noted"]


@dataclasses.dataclass(slots=True)
class _Ref:
    """In the arguments of an operation: the result of an earlier one."""

    index: int


@dataclasses.dataclass(slots=True)
class _Outside:
    """In the arguments of an operation: a tensor that was not seen to depend on the outputs."""

    tensor: Tensor
    version: int
    is_written: bool = False


class _Op:
    """One operation; ``_Ref`` and ``_Outside`` stand for tensors in its arguments and result."""

    __slots__ = (
        "args",
        "autocast",
        "func",
        "has_grad",
        "is_inplace",
        "kwargs",
        "name",
        "outsides",
        "refs",
        "result",
    )

    def __init__(
        self, func: Callable[..., Any], name: str, is_inplace: bool, has_grad: bool
    ) -> None:
        self.func, self.name, self.is_inplace, self.has_grad = func, name, is_inplace, has_grad
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.refs: list[int] = []
        self.outsides: list[_Outside] = []
        self.autocast: torch.dtype | None = None
        self.result: Any = None


class _Program:
    """From the outputs of one forward pass to its loss."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.device = "cpu"
        self.is_open = True
        self.is_lost = False
        self.starts: list[
            tuple[int, Tensor | None]
        ] = []  # of what backward() was called, and with which gradient
        self.ops: list[_Op] = []
        self.values: list[tuple[Tensor, int]] = []  # of the outputs, and their versions
        self.shapes: list[tuple[int, ...]] = []
        self.grads: list[bool] = []
        self.dtypes: set[torch.dtype] = set()
        self.arrived: list[Tensor | None] = []  # the gradient of each output
        self._key: list[Any] = []
        self._alive: list[weakref.ref[Tensor]] = []
        self._outputs: dict[int, tuple[Tensor, Tensor]] = {}

    def output(self, raw: Tensor) -> Tensor:
        if id(raw) in self._outputs:
            return self._outputs[id(raw)][1]
        if raw.dim() == 0 or len(raw) != self.n or type(raw) is not Tensor:
            return raw
        self.device = raw.device.type
        self.values.append((raw.detach(), raw._version))
        out = raw.view_as(raw)
        if raw.requires_grad:
            out.retain_grad()
        self._add(out)
        self._outputs[id(raw)] = raw, out
        return out

    def begin(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Op:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__  # type: ignore[attr-defined]
        is_inplace = name in _INPLACE or (name.endswith("_") and not name.endswith("__"))
        op = _Op(func, name, is_inplace, torch.is_grad_enabled())
        if torch.is_autocast_enabled(self.device):
            op.autocast = torch.get_autocast_dtype(self.device)
            self.dtypes.add(op.autocast)
        self._key.append(func)
        op.args = tuple([self._kept(value, op) for value in args])
        op.kwargs = {k: self._kept(value, op) for k, value in kwargs.items()}
        if is_inplace and isinstance(op.args[0], _Outside):
            outside = op.args[0]
            outside.tensor, outside.is_written = outside.tensor.detach().clone(), True
        return op

    def end(self, op: _Op, args: tuple[Any, ...], result: Any) -> None:
        if op.name in _LIKE:
            return
        op.result = self._add_all(args[0] if op.is_inplace and result is None else result)
        if op.result is not None:
            self.ops.append(op)

    def close(self) -> None:
        """From here on all tensors are plain ones."""
        if not self.is_open:
            return
        self.is_open = False
        for reference in self._alive:
            tensor = reference()
            if tensor is not None:
                tensor._fix_weakref()  # type: ignore[attr-defined]
                if type(tensor) is _Noted:
                    _make_plain(tensor)
        self._alive.clear()
        self.arrived = [
            out.grad if out.requires_grad else None for _, out in self._outputs.values()
        ]
        self._outputs.clear()

    def signature(self) -> int:
        return hash(tuple(self._key))

    def needed(self) -> list[_Op]:
        """The operations that lead to the loss."""
        if self.is_lost or not self.starts:
            raise _NotReplayed
        produced: dict[int, int] = {}
        for k, op in enumerate(self.ops):
            for ref in _flat(op.result):
                produced[ref.index] = k
        wanted: set[int] = set()
        stack = [index for index, _ in self.starts]
        keep: set[int] = set()
        while stack:
            index = stack.pop()
            if index in produced and index not in wanted:
                keep.add(produced[index])
                stack += self.ops[produced[index]].refs
            wanted.add(index)
        if any(op.is_inplace for op in self.ops):  # it may have changed what others see
            keep = set(range(len(self.ops)))
        needed = [op for k, op in enumerate(self.ops) if k in keep]
        if any(op.name in _RANDOM for op in needed) or any(
            t._version != version for t, version in self.values
        ):
            raise _NotReplayed
        for op in needed:
            for outside in op.outsides:
                t = outside.tensor
                if (t.requires_grad and t.grad_fn is not None) or (
                    t._version != outside.version and not outside.is_written
                ):
                    raise _NotReplayed
        return needed

    def _kept(self, value: Any, op: _Op) -> Any:
        if type(value) in _CONSTANTS:
            self._key.append(value)
            return value
        if type(value) is int or type(value) is float:
            return value
        if isinstance(value, Tensor):
            if type(value) is _Noted and value.noted[0] is self:
                index = value.noted[1]
                op.refs.append(index)
                if value.requires_grad and not self.grads[index]:
                    self._require_identity(value, index)
                return _Ref(index)
            outside = _Outside(value, value._version)
            op.outsides.append(outside)
            return outside
        if type(value) in (tuple, list):
            return type(value)([self._kept(v, op) for v in value])
        if isinstance(value, tuple):  # torch.Size
            return tuple(value)
        if type(value) is dict:
            return {k: self._kept(v, op) for k, v in value.items()}
        if type(value) is slice:
            return slice(*(self._kept(v, op) for v in (value.start, value.stop, value.step)))
        self._key.append(type(value))
        return value

    def _require_identity(self, value: Tensor, index: int) -> None:
        """A custom function gave this tensor its gradient: only module hooks' is the identity."""
        if type(value.grad_fn).__name__ != "BackwardHookFunctionBackward":
            self.is_lost = True
        for op in self.ops:
            if index in [ref.index for ref in _flat(op.result)]:
                op.has_grad = True
        self.grads[index] = True

    def _add_all(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._add(value)
        if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
            refs = [self._add_all(v) for v in value]
            return refs if any(ref is not None for ref in refs) else None
        return None

    def _add(self, tensor: Tensor) -> _Ref | None:
        if type(tensor) is not _Noted:
            if type(tensor) is not Tensor:
                return None
            tensor.__class__ = _Noted
            self._alive.append(weakref.ref(tensor))
        index = len(self.shapes)
        tensor.noted = self, index  # type: ignore[attr-defined]
        with torch._C.DisableTorchFunctionSubclass():
            self.shapes.append(tuple(tensor.shape))
            self.grads.append(tensor.requires_grad and torch.is_grad_enabled())
            if tensor.is_floating_point():
                self.dtypes.add(tensor.dtype)
        return _Ref(index)


# -- running it again for one record ---------------------------------------------------------------


class _NotReplayed(Exception):
    """What was noted cannot be run again for one record: nothing is known of the loss."""


class _NotAlone(Exception):
    """An operation failed on one record."""

    def __init__(self, op: _Op, error: Exception) -> None:
        super().__init__(str(error))
        self.op = op


class _Replay:
    """What was noted, run again: for one record in a batch of its own, or (None) for the batch."""

    def __init__(
        self,
        program: _Program,
        needed: Sequence[_Op],
        record: int | None,
        numbers: Mapping[tuple[int, int], float],
        *,
        is_double: bool,
        is_wide: bool = False,
    ) -> None:
        self.program, self.needed, self.record, self.numbers, self.is_double = (
            program,
            needed,
            record,
            numbers,
            is_double,
        )
        self.is_wide = is_wide  # any dimension of n entries, wherever it is, holds records
        self.n = program.n
        self.leaves: list[Tensor] = []
        self.values: dict[int, Tensor] = {}
        self.owners: dict[
            int, tuple[int, Tensor]
        ] = {}  # of tensors whose rows are not n blocks: dimension, records
        self.is_partial = False  # an operation got no row of this record

    def gradient(self) -> tuple[Tensor, ...]:
        """That of the loss with regard to each output; zeros where it has none."""
        with torch.enable_grad():
            for index, (value, _) in enumerate(self.program.values):
                value = value if self.record is None else value[self.record : self.record + 1]
                if value.is_floating_point() or value.is_complex():
                    value = self._number(value).detach().clone().requires_grad_()
                self.leaves.append(value)
                self.values[index] = value.clone()
            for place, op in enumerate(self.needed):
                self._run(place, op)
            starts = [
                (self.values[index].sum(), gradient) for index, gradient in self.program.starts
            ]
            total = sum(
                ((v if g is None else v * g.detach().to(v.dtype)) for v, g in starts),
                torch.zeros(()),
            )
            wanted = [leaf for leaf in self.leaves if leaf.requires_grad]
            if not total.requires_grad:
                raise _NotReplayed
            found = iter(torch.autograd.grad(total, wanted, allow_unused=True))
        gradients = [next(found) if leaf.requires_grad else None for leaf in self.leaves]
        return tuple(
            torch.zeros_like(leaf) if g is None else g
            for leaf, g in zip(self.leaves, gradients, strict=True)
        )

    def _run(self, place: int, op: _Op) -> None:
        with ExitStack() as stack:
            if not op.has_grad:
                stack.enter_context(torch.no_grad())
            if op.autocast is not None and not self.is_double:
                stack.enter_context(torch.autocast(self.program.device, op.autocast))
            error: Exception = ValueError("shapes do not fit")
            for sizes, is_left in self._ways(op):
                try:
                    args, kwargs = self._arguments(place, op, sizes, is_left)
                    func = Tensor.double if self.is_double and op.func in _FULL else op.func
                    result = func(*args, **kwargs)
                    if op.is_inplace and result is None:
                        result = args[0]
                    if self._place(op, op.result, result):
                        return
                except (RuntimeError, ValueError, IndexError, TypeError) as failure:
                    error = failure
        raise _NotAlone(op, error)

    def _ways(self, op: _Op) -> Iterator[tuple[int | None, bool]]:
        """Which integer stands for the records; are tensors aligned at their first dimensions?"""
        sizes: list[int | None] = [None]
        if self.record is not None and op.name in _SIZED:
            integers = list(_flat((op.args, op.kwargs), int))
            multiples: list[int | None] = [
                k for k, size in enumerate(integers) if size >= self.n and size % self.n == 0
            ]
            sizes = [None, *multiples] if integers[:1] == [-1] else [*multiples, None]
        sides = [op.name in _ROWS_FIRST, op.name not in _ROWS_FIRST]
        if self.record is None or not op.outsides or op.is_inplace:
            sides = sides[:1]
        return itertools.product(sizes, sides)

    def _arguments(
        self, place: int, op: _Op, size: int | None, is_left: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        integers, numbers = itertools.count(), itertools.count()
        scales = op.name.strip("_") in _SCALING
        weight = op.args[2] if len(op.args) > 2 else op.kwargs.get("weight")
        fixed = weight if op.name in ("cross_entropy", "nll_loss") else None

        def given(value: Any) -> Any:
            if isinstance(value, _Ref):
                return self.values[value.index]
            if isinstance(value, _Outside):
                number = self.numbers.get((place, next(numbers))) if scales else None
                if number is not None:
                    return self._number(torch.full_like(value.tensor, number))
                t = value.tensor.detach()
                t = t if self.record is None or value is fixed else self._own(t, op, is_left)
                return self._number(t.clone() if value.is_written else t)
            if type(value) in (tuple, list):
                return type(value)([given(v) for v in value])
            if type(value) is dict:
                return {k: given(v) for k, v in value.items()}
            if type(value) is slice:
                return slice(given(value.start), given(value.stop), given(value.step))
            if isinstance(value, torch.dtype):
                return torch.float64 if self.is_double and value.is_floating_point else value
            if scales and isinstance(value, (int, float)) and not isinstance(value, bool):
                return self.numbers.get((place, next(numbers)), value)
            if type(value) is int and next(integers) == size:
                return value // self.n
            return value

        if op.name == "__getitem__" and self.record is not None and isinstance(op.args[0], _Ref):
            key = self._own_key(op)
            if key is not None:
                return (self.values[op.args[0].index], key), {}
        return given(op.args), given(op.kwargs)

    def _number(self, t: Tensor) -> Tensor:
        return t.double() if self.is_double and t.is_floating_point() else t

    def rows_of(self, index: int) -> dict[int, Tensor]:
        """Of each dimension that holds records: whose its entries are."""
        if index in self.owners:
            dim, owners = self.owners[index]
            return {dim: owners}
        noted, now = self.program.shapes[index], self.values[index].shape
        each = torch.arange(self.n)
        return {
            d: each.repeat_interleave(b)
            for d, (a, b) in enumerate(zip(noted, now, strict=True))
            if a != b and a == b * self.n
        }

    def _own(self, t: Tensor, op: _Op, is_left: bool) -> Tensor:
        """This record's part of a tensor from outside."""
        done: set[int] = set()
        most = 0
        for index in op.refs:
            noted = self.program.shapes[index]
            most = max(most, len(noted))
            for dim, owners in self.rows_of(index).items():
                own = dim if is_left else dim + t.dim() - len(noted)
                if 0 <= own < t.dim() and own not in done and t.shape[own] == len(owners):
                    done.add(own)
                    t = t.index_select(
                        own, torch.eq(owners, self.record or 0).nonzero().flatten().to(t.device)
                    )
                    self.is_partial |= t.shape[own] == 0
        if not done and t.dim() > 0 and self.record is not None:
            if len(t) == self.n and (t.dim() > most or is_left):
                return t[self.record : self.record + 1]
            if self.is_wide and self.n in t.shape:
                return t.narrow(list(t.shape).index(self.n), self.record, 1)
        return t

    def _own_key(self, op: _Op) -> Any:
        """The key that chose rows, for the rows of this record; None where it chose none."""
        source = op.args[0].index
        rows = self.rows_of(source).get(0)
        key = op.args[1] if isinstance(op.args[1], tuple) else (op.args[1],)
        if rows is None or not key or list(_flat(key, _Ref)):
            return None
        parts = [k.tensor.cpu() if isinstance(k, _Outside) else k for k in key]
        first = torch.tensor(list(parts[0])) if isinstance(parts[0], (list, range)) else parts[0]
        if isinstance(first, slice):
            if first == slice(None):
                return None
        elif not isinstance(first, Tensor) or first.dim() != 1 or first.dtype is torch.uint8:
            return None
        device = self.values[source].device
        chosen = torch.arange(len(rows))[first]
        mine = torch.eq(rows[chosen], self.record or 0)
        place = torch.cumsum(torch.eq(rows, self.record or 0), 0) - 1
        local = place[chosen[mine]]
        rest = [
            (
                k[mine].to(device)
                if isinstance(k, Tensor) and isinstance(first, Tensor) and k.shape == chosen.shape
                else k
            )
            for k in parts[1:]
        ]
        self.is_partial |= len(local) == 0
        self.owners[next(_flat(op.result)).index] = 0, rows[chosen]
        return (local.to(device), *rest)

    def _place(self, op: _Op, refs: Any, result: Any) -> bool:
        """Keep what an operation gave, if its shape is that of a part of what was noted."""
        if refs is None:
            return True
        if not isinstance(refs, _Ref):
            return (
                isinstance(result, (tuple, list))
                and len(result) == len(refs)
                and all(self._place(op, r, t) for r, t in zip(refs, result, strict=True))
            )
        noted = self.program.shapes[refs.index]
        if not isinstance(result, Tensor) or result.dim() != len(noted):
            return False
        if self.record is not None:
            self._inherit(op, refs.index, noted, result)
            explicit = self.owners.get(refs.index, (-1, noted))[0]
            for d, (a, b) in enumerate(zip(noted, result.shape, strict=True)):
                if a != b and a != b * self.n and d != explicit:
                    return False
        self.values[refs.index] = result
        return True

    def _inherit(self, op: _Op, index: int, noted: tuple[int, ...], result: Tensor) -> None:
        """Whose the rows of a result are, where they are not n blocks."""
        if index in self.owners or not noted:
            return
        sources = [self.rows_of(i) for i in op.refs]
        if op.name in ("cat", "concat", "concatenate"):
            parts = [rows[0] for rows in sources if 0 in rows]
            if len(parts) == len(sources) and sum(map(len, parts)) == noted[0]:
                self.owners[index] = 0, torch.cat(parts)
            return
        for i, rows in zip(op.refs, sources, strict=True):
            shape = self.program.shapes[i]
            if i in self.owners and self.owners[i][0] == 0 and noted[0] == len(rows[0]):
                self.owners[index] = 0, rows[0]
            elif (
                1 in rows
                and len(shape) > 1
                and noted[0] == shape[0] * shape[1]
                and len(result) == self.values[i].shape[:2].numel()
            ):
                self.owners[index] = 0, rows[1].repeat(shape[0])


def _flat(value: Any, kind: type = _Ref) -> Iterator[Any]:
    if isinstance(value, kind) and not isinstance(value, bool):
        yield value
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from _flat(v, kind)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()), kind)
    elif isinstance(value, slice):
        yield from _flat((value.start, value.stop, value.step), kind)


# -- numbers that may stand for the number of records ----------------------------------------------


@dataclasses.dataclass
class _Number:
    place: tuple[int, int]  # operation, and which of its numbers
    value: float
    options: list[str]


def _numbers(needed: Sequence[_Op], n: int) -> list[_Number]:
    found = []
    for k, op in enumerate(needed):
        if op.name.strip("_") not in _SCALING:
            continue
        numbers = itertools.count()
        for value in _flat((op.args, op.kwargs), (_Outside, int, float)):  # type: ignore[arg-type]
            place = k, next(numbers)
            number: float | None = (
                value if not isinstance(value, _Outside) else _uniform(value.tensor)
            )
            options = (
                []
                if number is None
                else _options(number, n, is_python=not isinstance(value, _Outside))
            )
            if number is not None and len(options) > 1:
                found.append(_Number(place, number, options))
    return found


def _uniform(t: Tensor) -> float | None:
    if t.numel() == 0 or t.is_complex():
        return None
    first = t.flatten()[0]
    return float(first) if t.dim() == 0 or bool((t == first).all()) else None


def _options(value: float, n: int, *, is_python: bool) -> list[str]:
    if not math.isfinite(value) or value == 0:
        return ["constant"]
    if _is_whole(value / n):
        return ["c n", "constant"]
    if _is_whole(1 / (value * n)):
        return ["x/n", "constant"]
    if not is_python or _is_whole(value) or _is_whole(1 / value):
        return ["constant"]
    return ["constant", "maybe x/n"]


def _is_whole(value: float) -> bool:
    return abs(value) > 0.5 and math.isclose(value, round(value), rel_tol=1e-6)


def _read(value: float, way: str, n: int) -> float:
    if way == "constant":
        return value
    if way != "c n":
        return value * n
    return value // n if isinstance(value, int) else value / n


# -- comparing -------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Verdict:
    is_same: bool | None
    record: int = 0
    ratio: float | None = (
        None  # of the gradient that arrived to the record's own, where that is one number
    )
    failed: _Op | None = None


def _verdict(
    program: _Program,
    needed: Sequence[_Op],
    records: Sequence[int],
    unit: int,
    numbers: Mapping[tuple[int, int], float],
    is_wide: bool,
) -> _Verdict:
    """Is the gradient that arrived at the records' outputs, times ``unit``, their own?"""
    compared: list[tuple[int, Tensor, Tensor]] = []
    noise, missing = 0.0, []
    for i in records:
        arrived = [program.arrived[k] for k in range(len(program.values))]
        pieces = [
            torch.zeros_like(value[i : i + 1]) if g is None else g[i : i + 1]
            for g, (value, _) in zip(arrived, program.values, strict=True)
        ]
        came = torch.cat([p.detach().double().flatten() for p in pieces]) * unit
        exact, rough = (
            _Replay(program, needed, i, numbers, is_double=d, is_wide=is_wide)
            for d in (True, False)
        )
        try:
            own, coarse = (
                torch.cat([g.double().flatten() for g in r.gradient()]) for r in (exact, rough)
            )
        except _NotAlone as failure:
            pairs = _compares_pairs(exact) or failure.op.name in _OF_SEVERAL
            return _Verdict(False if pairs else None, i, None, failure.op)
        if not bool(torch.isfinite(came).all()):
            if bool(torch.isfinite(torch.cat([own, coarse])).all()):
                return _Verdict(False, i)  # another record made it so
        elif bool(torch.isfinite(own).all()):
            compared.append((i, came, own))
            difference = (coarse - own).abs().nan_to_num(0.0, 0.0, 0.0).max()
            noise = max(noise, float(difference))
        elif exact.is_partial:
            return _Verdict(None)
        elif bool((came != 0).any()) and all(
            bool(torch.isfinite(v[i].double()).all()) for v, _ in program.values
        ):
            missing.append(i)
    if not compared:
        return (
            _Verdict(False, missing[0])
            if len(missing) > 1 and len(missing) == len(records)
            else _Verdict(None)
        )
    lowest = max(program.dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    finfo = torch.finfo(lowest)
    tolerance = _TOLERANCE.get(lowest, 0.5)
    wrong, ratios = [], []
    for i, came, own in compared:
        largest = float(own.abs().max())
        limit = tolerance * largest + 16 * noise + 4 * unit * finfo.tiny * finfo.eps
        if float((came - own).abs().max()) > limit:
            wrong.append(i)
        if largest > limit:
            at = own.abs().argmax()
            ratio = float(came[at] / own[at])
            ratios.append(
                ratio
                if float((came - ratio * own).abs().max()) <= limit * max(1.0, abs(ratio))
                else math.nan
            )
    if not wrong:
        return _Verdict(True)
    is_common = bool(ratios) and all(
        math.isclose(ratio, ratios[0], rel_tol=1e-3) for ratio in ratios
    )
    return _Verdict(False, wrong[0], ratios[0] if is_common else None)


def _compares_pairs(replay: _Replay) -> bool:
    """Has something as many rows as columns, one for each record?"""
    return any(len(replay.rows_of(index)) > 1 for index in replay.values)


# -- saying what is wrong --------------------------------------------------------------------------


def _explained(program: _Program, needed: Sequence[_Op], verdict: _Verdict, reduction: str) -> str:
    if not _explains_gradient(program, needed):
        return (
            "the gradient was changed on its way from the loss to the model's output: take "
            "tensor hooks (register_hook) off the output and off what is computed from it."
        )
    end = f".{reduction}()"
    for op in needed:
        if (
            op.name in ("cross_entropy", "nll_loss")
            and op.kwargs.get("reduction", "mean") == "mean"
        ):
            call = f"F.{op.name}(out, y"
            if (op.kwargs.get("weight") if len(op.args) < 3 else op.args[2]) is not None:
                return (
                    f"{op.name}(weight=) divides by the weights of the whole batch, "
                    "so records move each other's gradients. "
                    f'Write {call}, weight=weight, reduction="none"){end}.'
                )
            ignored = op.kwargs.get("ignore_index", -100)
            target = op.args[1] if len(op.args) > 1 else op.kwargs.get("target")
            if (
                isinstance(target, _Outside)
                and not target.tensor.is_floating_point()
                and bool((target.tensor == ignored).any())
            ):
                return (
                    f"{op.name} divides by the number of targets in the batch "
                    f"that are not ignore_index={ignored}. "
                    f'Write {call}, ignore_index={ignored}, reduction="none"){end}.'
                )
    ratio, n = verdict.ratio, program.n
    for op in needed:
        if (
            op.name.strip("_") in ("div", "divide", "truediv", "true_divide", "itruediv")
            and len(op.args) > 1
        ):
            divisor = op.args[1]
            if isinstance(divisor, _Outside) and divisor.tensor.numel() == 1 and ratio is not None:
                return (
                    "the loss divides by a count or sum over the whole batch, as a masked mean"
                    " does. Divide within each record: ((losses * mask).sum(1) /"
                    f" mask.sum(1)){end}, or (losses * mask){end} for one number each."
                )
            if (
                isinstance(divisor, (int, float))
                and ratio is not None
                and not _is_whole(divisor / n)
            ):
                return (
                    f"the loss divides by {divisor:g}, and this batch has another number of "
                    "records. Write "
                    f'losses.mean() with reduction="none" losses, or divide by len(out).'
                )
    if ratio is not None and math.isclose(ratio, n, rel_tol=1e-3) and reduction == "mean":
        return (
            'the loss is a sum over records, and loss_reduction is "mean". Write losses.mean(), or '
            'pass loss_reduction="sum" to make_private.'
        )
    if ratio is not None and math.isclose(ratio * n, 1.0, rel_tol=1e-3) and reduction == "sum":
        return (
            'the loss is a mean over records, and loss_reduction is "sum". Write losses.sum(), or '
            'pass loss_reduction="mean" to make_private.'
        )
    where = verdict.failed or _first_mixing(program, needed, verdict.record)
    name = f" ({where.name.strip('_')})" if where is not None else ""
    return (
        f"the loss mixes records{name}: one record's gradient depends on the others in the batch. "
        f"Compute a loss of each record from its own row, and end with losses{end}."
    )


def _explains_gradient(program: _Program, needed: Sequence[_Op]) -> bool:
    """Does what was noted, run again for the whole batch, give the gradient that arrived?"""
    found = _Replay(program, needed, None, {}, is_double=False).gradient()
    for k, g in enumerate(found):
        arrived = program.arrived[k]
        if arrived is None:
            continue
        finite = torch.isfinite(arrived) & torch.isfinite(g)
        a, b = torch.where(finite, arrived, 0).double(), torch.where(finite, g, 0).double()
        if float((a - b).abs().max()) > 1e-2 * float(a.abs().max().maximum(b.abs().max())):
            return False
    return True


def _first_mixing(program: _Program, needed: Sequence[_Op], record: int) -> _Op | None:
    """The operation after which a record's row is no longer what it is alone."""
    whole = _Replay(program, needed, None, {}, is_double=True)
    alone = _Replay(program, needed, record, {}, is_double=True)
    try:
        whole.gradient()
        alone.gradient()
    except (_NotAlone, _NotReplayed, RuntimeError):
        return None
    maker = {ref.index: op for op in needed for ref in _flat(op.result)}
    for op in needed:
        for ref in _flat(op.result):
            for dim, owners in alone.rows_of(ref.index).items():
                own = whole.values[ref.index].index_select(
                    dim, (owners == record).nonzero().flatten()
                )
                if own.shape == alone.values[ref.index].shape and not torch.allclose(
                    own.double(), alone.values[ref.index].double(), rtol=1e-6, equal_nan=True
                ):
                    reduced = [i for i in op.refs if not alone.rows_of(i) and i in maker]
                    return maker[reduced[0]] if reduced else op
    return None
