"""What is computed from a model's outputs, noted operation by operation up to the loss."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_INPLACE = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __idiv__ __itruediv__ __ipow__ __ifloordiv__ "
    "__imod__".split()
)
SCALING = frozenset(
    "mul multiply rmul imul div divide true_divide truediv rdiv rtruediv itruediv".split()
)
_LIKE = frozenset(("rand_like", "randn_like", "randint_like"))
_RANDOM = frozenset(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout dropout_ "
    "alpha_dropout_ bernoulli bernoulli_ multinomial normal normal_ poisson gumbel_softmax rrelu "
    "rrelu_ uniform_ random_ exponential_ "
    "cauchy_ log_normal_ geometric_ scaled_dot_product_attention "
    "multi_head_attention_forward".split()
)


_NUMBERS = frozenset((Tensor.item, Tensor.__float__))
_LEAVES = frozenset(
    (*_NUMBERS, Tensor.__int__, Tensor.__index__, Tensor.tolist, Tensor.numpy, Tensor.__array__)
)


TRAINED = (
    "the loss uses a parameter outside the model (shape {}), whose gradient is neither clipped nor"
    " noisy: put its module into the model, or freeze it with requires_grad_(False)."
)


class NotReplayed(Exception):
    """What was noted cannot be run again for one record: nothing is known of the loss."""


def flat(value: Any, kind: type | tuple[type, ...]) -> Iterator[Any]:
    """Everything of a kind in nested tuples, lists, dicts and slices."""
    if isinstance(value, kind) and not isinstance(value, bool):
        yield value
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from flat(v, kind)
    elif isinstance(value, dict):
        yield from flat(list(value.values()), kind)
    elif isinstance(value, slice):
        yield from flat((value.start, value.stop, value.step), kind)


class Noted(Tensor):
    """A tensor that depends on the model's outputs; until the step, operations on it are noted."""

    noted: tuple[Program, int]

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
        first = args[0] if args and type(args[0]) is Noted else next(flat((args, kwargs), Noted))
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
_TYPES = {Noted, Tensor, torch.nn.Parameter}
_AS_PLAIN = {Tensor.__repr__, Tensor.__format__, Tensor.__reduce_ex__, Tensor.__deepcopy__}
_PLAIN_PROPERTIES = {
    getattr(Tensor, name).__get__
    for name in "shape dtype device requires_grad grad_fn is_leaf layout ndim is_cuda".split()
}


def _as_plain(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    noted = [(t, t.noted) for t in flat((args, kwargs), Noted)]
    try:
        for t, (program, _) in noted:
            program.leaves()
            _make_plain(t)
        return func(*args, **kwargs)
    finally:
        for t, note in noted:
            t.__class__ = Noted
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
    program = next(flat(tensors, Noted)).noted[0]
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if type(tensor) is not Noted:
            program.is_lost = True
            continue
        if gradient is not None and gradient.dim() > 0:
            if type(gradient) is not Noted and bool((gradient != gradient.flatten()[:1]).any()):
                program.is_guided = True
            tensor, gradient = (tensor * gradient).sum(), None
        program.starts.append((tensor.noted[1], gradient))


def _make_plain(tensor: Tensor) -> None:
    tensor.__class__ = Tensor
    del tensor.__dict__["noted"]


@dataclasses.dataclass(slots=True)
class Ref:
    """In the arguments of an operation: the result of an earlier one."""

    index: int


@dataclasses.dataclass(slots=True)
class Outside:
    """In the arguments of an operation: a tensor that was not seen to depend on the outputs."""

    tensor: Tensor
    version: int
    is_written: bool = False


class Op:
    """One operation; ``Ref`` and ``Outside`` stand for tensors in its arguments and result."""

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
        self.outsides: list[Outside] = []
        self.autocast: torch.dtype | None = None
        self.result: Any = None


class Program:
    """From the outputs of one forward pass to its loss."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.device = "cpu"
        self.is_open = True
        self.is_lost = False
        self.is_guided = False  # by gradients that were made elsewhere
        self.starts: list[
            tuple[int, Tensor | None]
        ] = []  # of what backward() was called, and with which gradient
        self.ops: list[Op] = []
        self.values: list[tuple[Tensor, int]] = []  # of the outputs, and their versions
        self.shapes: list[tuple[int, ...]] = []
        self.grads: list[bool] = []
        self.dtypes: set[torch.dtype] = set()
        self.arrived: list[Tensor | None] = []  # the gradient of each output
        self._key: list[Any] = []
        self._alive: list[weakref.ref[Tensor]] = []
        self._taken: dict[int, tuple[float, int]] = {}  # numbers out of tensors, by identity
        self._first_left: int | None = None  # how many operations came before
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

    def begin(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Op:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__  # type: ignore[attr-defined]
        is_inplace = name in _INPLACE or (name.endswith("_") and not name.endswith("__"))
        op = Op(func, name, is_inplace, torch.is_grad_enabled())
        if torch.is_autocast_enabled(self.device):
            op.autocast = torch.get_autocast_dtype(self.device)
            self.dtypes.add(op.autocast)
        self._key.append(func)
        op.args = tuple([self._kept(value, op) for value in args])
        op.kwargs = {k: self._kept(value, op) for k, value in kwargs.items()}
        if is_inplace and isinstance(op.args[0], Outside):
            outside = op.args[0]
            outside.tensor, outside.is_written = outside.tensor.detach().clone(), True
        return op

    def end(self, op: Op, args: tuple[Any, ...], result: Any) -> None:
        if op.name in _LIKE:
            return
        if op.func in _LEAVES:
            self.leaves()
        if op.func in _NUMBERS and type(result) is float:
            self._taken[id(result)] = result, len(self.shapes)
            op.result = self._new((), False)
        else:
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
                if type(tensor) is Noted:
                    _make_plain(tensor)
        self._alive.clear()
        self._taken.clear()
        self.arrived = [
            out.grad if out.requires_grad else None for _, out in self._outputs.values()
        ]
        self._outputs.clear()

    def signature(self) -> int:
        """The way in which the loss is computed, and what some of its divisors are made of."""
        divisors: list[Any] = []
        for op in self.ops:
            if op.name in ("cross_entropy", "nll_loss"):
                divisors.append(_divides_unevenly(op))
            elif op.name.strip("_") in SCALING:
                divisors += [None if k % self.n else k // self.n for k in flat(op.args, int)]
        return hash((*self._key, *divisors))

    def leading(self) -> set[int]:
        """Places of the operations whose results the loss is computed from."""
        produced: dict[int, int] = {}
        for k, op in enumerate(self.ops):
            for ref in flat(op.result, Ref):
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
        return keep

    def needed(self) -> list[Op]:
        """The operations that lead to the loss."""
        if self.is_lost or not self.starts:
            raise NotReplayed
        keep = self.leading()
        for place in keep:
            for t in (outside.tensor for outside in self.ops[place].outsides):
                if t.requires_grad and t.is_leaf and self.ops[place].has_grad:
                    raise RuntimeError(TRAINED.format(list(t.shape)))
        if any(op.is_inplace for op in self.ops):  # it may have changed what others see
            keep = set(range(len(self.ops)))
        needed = [op for k, op in enumerate(self.ops) if k in keep]
        if any(op.name in _RANDOM for op in needed) or any(
            t._version != version for t, version in self.values
        ):
            raise NotReplayed
        for op in needed:
            for outside in op.outsides:
                t = outside.tensor
                if (t.requires_grad and t.grad_fn is not None) or (
                    t._version != outside.version and not outside.is_written
                ):
                    raise NotReplayed
        return needed

    def leaves(self) -> None:
        """Numbers of the outputs leave torch."""
        if self._first_left is None:
            self._first_left = len(self.ops)

    def later_numbers(self, needed: Sequence[Op]) -> list[float]:
        """Numbers that operations ``needed`` for the loss take after some left torch: they may be
        made of those.
        """
        if self._first_left is None:
            return []
        later = {id(op) for op in self.ops[self._first_left :]}.intersection(map(id, needed))
        values = [
            value for op in self.ops if id(op) in later for value in flat(op.args, (float, Outside))
        ]
        return [
            float(value.tensor) if type(value) is Outside else value
            for value in values
            if type(value) is not Outside or value.tensor.numel() == 1
        ]

    def _kept(self, value: Any, op: Op) -> Any:
        if type(value) in _CONSTANTS:
            self._key.append(value)
            return value
        if type(value) is float and id(value) in self._taken:
            index = self._taken[id(value)][1]
            op.refs.append(index)
            return Ref(index)
        if type(value) is int or type(value) is float:
            return value
        if isinstance(value, Tensor):
            if type(value) is Noted and value.noted[0] is self:
                index = value.noted[1]
                op.refs.append(index)
                if value.requires_grad and not self.grads[index]:
                    self._require_identity(value, index)
                return Ref(index)
            outside = Outside(value, value._version)
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
            if index in [ref.index for ref in flat(op.result, Ref)]:
                op.has_grad = True
        self.grads[index] = True

    def _add_all(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._add(value)
        if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
            refs = [self._add_all(v) for v in value]
            return refs if any(ref is not None for ref in refs) else None
        return None

    def _add(self, tensor: Tensor) -> Ref | None:
        if type(tensor) is not Noted:
            if type(tensor) is not Tensor:
                return None
            tensor.__class__ = Noted
            self._alive.append(weakref.ref(tensor))
        tensor.noted = self, len(self.shapes)  # type: ignore[attr-defined]
        with torch._C.DisableTorchFunctionSubclass():
            if tensor.is_floating_point():
                self.dtypes.add(tensor.dtype)
            return self._new(tuple(tensor.shape), tensor.requires_grad and torch.is_grad_enabled())

    def _new(self, shape: tuple[int, ...], has_grad: bool) -> Ref:
        self.shapes.append(shape)
        self.grads.append(has_grad)
        return Ref(len(self.shapes) - 1)


def _divides_unevenly(op: Op) -> bool:
    """Whether a mean of cross_entropy or nll_loss divides by another number than that of its
    targets.
    """
    target = op.args[1] if len(op.args) > 1 else op.kwargs.get("target")
    weight = op.args[2] if len(op.args) > 2 else op.kwargs.get("weight")
    if (
        op.kwargs.get("reduction", "mean") != "mean"
        or not isinstance(target, Outside)
        or target.tensor.is_floating_point()
    ):
        return False
    if bool((target.tensor == op.kwargs.get("ignore_index", -100)).any()):
        return True
    if not isinstance(weight, Outside):
        return False
    of_targets = weight.tensor[target.tensor].flatten()
    return bool((of_targets != of_targets[:1]).any())
