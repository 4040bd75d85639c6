# ruff: noqa: SLF001 - Followed tensors and what is done with them are one thing
"""The loss of a training loop, computed for each record alone.

What the private loader delivers, and what the private model makes of it, are :class:`Followed`
tensors. They have a shape, but no storage and no autograd graph of their own: the values are kept
beside them, one row for each record. An operation on followed tensors is run by ``torch.func.vmap``
for each record as a batch of one, so that the result of record i is made of record i. The end is a
mean or sum over the records, and ``backward()``.

What avoids torch's Python functions (TorchScript, C++, ``torch.func``, DLPack, NumPy) meets
``__torch_dispatch__``, which refuses, or finds no storage.

The number of records in a batch is data, too. Until ``backward()`` every followed tensor shows the
expected batch size in its place. Afterwards the values, and the number of records, are ordinary.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import DPBayesError, LossError
from .nested import map_tensors
from .record_map import CannotBeMapped, RecordMap, in_plain_words, require_no_modes

_INSTEAD = (
    "Compute the loss for each record alone: make_private(..., loss=fn) with fn(output, target) of"
    " one record, and net.private_loss(x, y).backward() in the loop"
)
# The number of records on meta tensors: a dimension that it divides is the one of the records.
_PRIME = 10007
_ROWS_TRIED = 3  # synthetic records on which an operation is compared with itself


class Batch:
    """One delivered batch. It is open until its ``backward()`` is over.

    Args:
        shown: the number of records that followed tensors show, a public constant.
        is_empty: no record was drawn; one synthetic record stands in, and counts as none.

    Attributes:
        refusal: why a use of the batch was refused; then every further use is.
        loss_reduction: what the loss has to do over the records, by the model's last pass.
        leaves: the tensors that may receive a gradient, by the model's last pass.
    """

    __slots__ = ("is_empty", "is_open", "leaves", "loss_reduction", "refusal", "shown")

    def __init__(self, shown: int, *, is_empty: bool = False) -> None:
        self.shown, self.is_empty = shown, is_empty
        self.is_open = True
        self.refusal: str | None = None
        self.loss_reduction: str | None = None
        self.leaves: Sequence[Tensor] = ()

    def close(self) -> None:
        """Values are ordinary from now on, and may not come back into a loss."""
        self.is_open = False

    def refuse(self, what: str, code: str = "loss-mixes", remedy: str = _INSTEAD) -> LossError:
        """The error of this use, and of every later one."""
        self.refusal = self.refusal or what
        return LossError(f"{what}. {remedy}.", code=code)


class Delivery:
    """Hands out batches as followed tensors, one open batch at a time.

    Args:
        expected_batch_size: what followed tensors show as the number of their records.
    """

    def __init__(self, expected_batch_size: float) -> None:
        self._shown = max(2, round(expected_batch_size))
        self._last: Batch | None = None

    def __call__(self, delivered: Any, records: int) -> Any:
        """``delivered`` with its tensors followed.

        Args:
            delivered: tensors with records in dimension 0, in nested tuples, lists and mappings.
            records: how many records it holds.
        """
        if self._last is not None:
            self._last.close()
        self._last = batch = Batch(self._shown, is_empty=records == 0)

        def followed(t: Tensor) -> Tensor:
            if t.dim() == 0 or len(t) != records:
                return t.as_subclass(Derived)  # made of several records by collate_fn
            if records == 0:
                t = (
                    t.new_ones(1, *t.shape[1:])
                    if t.is_floating_point()
                    else t.new_zeros(1, *t.shape[1:])
                )
            return Followed.of(t, batch)

        return map_tensors(delivered, followed)


class Derived(Tensor):
    """An ordinary tensor that was computed from records. What is computed from it is one, too. It
    may not meet followed tensors: it would carry other records into the loss.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(v, Followed) for v in _flat((args, kwargs))[0]):
            return Followed.__torch_function__(func, types, args, kwargs)
        found = super().__torch_function__(func, types, args, kwargs)
        _mark_written(func, args, kwargs or {})
        return found

    def __copy__(self) -> Tensor:
        return self.detach()

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _ordinary(self).__reduce_ex__(protocol)

    def __format__(self, spec: str) -> str:
        return format(_ordinary(self), spec)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return _ordinary(self).__repr__(**options)


def _mark_written(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """What values of a batch were written into holds them, too."""
    name = _name_of(func)
    written = [kwargs.get("out")]
    if args and _is_in_place(name, kwargs):
        written.append(args[0])
    for t in written:
        if type(t) is Tensor:
            t.__class__ = Derived


def _ordinary(t: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return t.as_subclass(Tensor)


class Later:
    """A number taken out of a batch before ``backward()``, such as ``loss.item()``. It can be added
    up, scaled and stored; it becomes a float after ``backward()``.
    """

    def __init__(self, value: Callable[[], float], batch: Batch) -> None:
        self._value, self._batch = value, batch

    def __float__(self) -> float:
        if self._batch.is_open:
            raise self._batch.refuse(
                "the value of a number is needed before backward(), on which the loss could then"
                " depend",
                "loss-number",
                "Read it after backward()",
            )
        return self._value()

    def _with(self, other: Any, function: Callable[[float, float], float]) -> Any:
        if isinstance(other, Tensor):
            raise self._batch.refuse("a number of the batch comes back into the loss")
        if not isinstance(other, (int, float, Later)):
            return NotImplemented
        mine, theirs = _now(self), _now(other)
        waiting = [v for v in (mine, theirs) if isinstance(v, Later)]
        if not waiting:
            return function(mine, theirs)
        return Later(lambda: function(float(mine), float(theirs)), waiting[0]._batch)

    def __add__(self, other: Any) -> Any:
        return self._with(other, lambda a, b: a + b)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._with(other, lambda a, b: a - b)

    def __rsub__(self, other: Any) -> Any:
        return self._with(other, lambda a, b: b - a)

    def __mul__(self, other: Any) -> Any:
        return self._with(other, lambda a, b: a * b)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._with(other, lambda a, b: a / b)

    def __rtruediv__(self, other: Any) -> Any:
        return self._with(other, lambda a, b: b / a)

    def __neg__(self) -> Any:
        return self._with(-1.0, lambda a, b: a * b)

    def __lt__(self, other: Any) -> bool:
        return float(self) < float(other)

    def __gt__(self, other: Any) -> bool:
        return float(self) > float(other)

    def __le__(self, other: Any) -> bool:
        return float(self) <= float(other)

    def __ge__(self, other: Any) -> bool:
        return float(self) >= float(other)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (int, float, Later)) and float(self) == float(other)

    def __hash__(self) -> int:
        return hash(float(self))

    def __bool__(self) -> bool:
        return bool(float(self))

    def __int__(self) -> int:
        return int(float(self))

    def __round__(self, digits: int | None = None) -> Any:
        return self if self._batch.is_open else round(float(self), digits)

    def __format__(self, spec: str) -> str:
        return "(after backward)" if self._batch.is_open else format(float(self), spec)

    def __repr__(self) -> str:
        return format(self, "")

    __str__ = __repr__


def _now(number: Any) -> Any:
    return float(number) if isinstance(number, Later) and not number._batch.is_open else number


_CONTAINERS = (tuple, list, dict)


def _flat(value: Any) -> tuple[list[Any], Any]:
    """The leaves of nested values, and how they are nested; arguments of a function quickly."""
    if type(value) is tuple and len(value) == 2 and type(value[0]) is tuple:
        args, kwargs = value
        if type(kwargs) is dict and not any(
            isinstance(v, _CONTAINERS) for v in (*args, *kwargs.values())
        ):
            return [*args, *kwargs.values()], (len(args), tuple(kwargs))
    return tree_flatten(value)


def _rebuilt(leaves: Sequence[Any], spec: Any) -> Any:
    if type(spec) is tuple:
        count, names = spec
        return tuple(leaves[:count]), dict(zip(names, leaves[count:], strict=True))
    return tree_unflatten(leaves, spec)


def _names(*texts: str) -> frozenset[str]:
    return frozenset(name for text in texts for name in text.split())


_METADATA = _names(
    "shape dtype device ndim layout is_cuda is_cpu is_sparse itemsize nbytes is_nested",
    "is_quantized is_meta is_mps is_xpu is_mkldnn names size dim ndimension numel nelement",
    "is_floating_point is_complex is_signed element_size get_device __len__ __hash__",
    "is_same_size is_inference is_leaf is_contiguous is_pinned retains_grad",
)
_NUMBERS = _names(
    "item __float__ __int__ __bool__ __index__ __complex__ tolist numpy __array__",
    "is_nonzero equal allclose __contains__ __iter__ __format__",
)
# One to one on records, whatever the shape: they run on all rows at once.
_TO_ELSEWHERE = _names(
    "to cpu cuda pin_memory contiguous clone detach float double half bfloat16 long int",
    "short char byte bool",
)
_ELEMENTWISE = _names(
    "add __add__ __radd__ sub __sub__ __rsub__ rsub subtract mul __mul__ __rmul__ multiply",
    "div __truediv__ __rtruediv__ true_divide divide pow __pow__ __rpow__ neg __neg__ abs",
    "exp log log1p expm1 sqrt rsqrt square sigmoid tanh relu softplus logsigmoid sin cos",
    "clamp clamp_min clamp_max where maximum minimum eq ne lt le gt ge __eq__ __ne__",
    "__lt__ __le__ __gt__ __ge__ logical_and logical_or logical_not __and__ __or__",
    "__invert__ isnan isfinite sign lgamma digamma erf reciprocal nan_to_num",
)
# A reduced loss may be multiplied by fixed numbers and added to others.
_LINEAR = _names(
    "add __add__ __radd__ sub __sub__ __rsub__ rsub mul __mul__ __rmul__ multiply div",
    "true_divide divide __truediv__ neg __neg__ sum mean stack squeeze reshape view",
    "subtract",
)
_SIZES = _names(
    "view reshape expand new_zeros new_ones new_full new_empty unflatten broadcast_to",
    "repeat",
)
_LOSSES = frozenset(
    name
    for name in dir(F)
    if name.endswith("_loss") or name.startswith("binary_cross_entropy") or name == "cross_entropy"
) | {"kl_div"}
# Losses of torch.nn.functional that compute each row, or each entry, by itself.
_OF_CLASSES = _names("cross_entropy nll_loss")
_OF_ENTRIES = _names(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits",
    "poisson_nll_loss soft_margin_loss kl_div",
)


@lru_cache(2048)
def _name_of(function: Any) -> str:
    name: str = getattr(function, "__name__", str(function))
    if name == "__get__":
        return str(function.__self__.__name__)
    return f"{name} {function.__self__.__name__}" if name == "__set__" else name


@lru_cache(2048)
def _is_torchs(function: Any) -> bool:
    """Whether a function that torch hands to followed tensors is torch's own: of C++, or defined in
    one of its modules.
    """
    if isinstance(function, FunctionType):
        home = str(function.__globals__.get("__name__"))
        module = sys.modules.get(home)
        return home.partition(".")[0] == "torch" and function.__globals__ is vars(module)
    return type(function).__module__ == "builtins"


def _is_in_place(name: str, kwargs: dict[str, Any]) -> bool:
    is_named = name.endswith("_") and not name.endswith("__")
    return (
        is_named
        or (
            name.startswith(("__set", "__i"))
            and name
            not in (
                "__invert__",
                "__index__",
                "__int__",
                "__iter__",
            )
        )
        or bool(kwargs.get("inplace"))
    )


class Followed(Tensor):
    """A tensor of a batch whose every operation runs for each record alone.

    Attributes:
        _rows: the values, (records, \\*shape of one record as a batch of one); of a reduced loss
            (records, \\*shape); of a sealed value a tensor without values.
        _batch: the batch that it belongs to.
        _dim: the dimension of the records in the shape that it shows; None after a reduction.
        _how: ``"mean"`` or ``"sum"`` after a reduction over the records, ``"sealed"`` for a value
            that several records made, which is there after ``backward()``.
    """

    _rows: Tensor
    _batch: Batch
    _dim: int | None
    _how: str | None
    _value: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls, rows: Tensor, batch: Batch, dim: int | None = 0, how: str | None = None
    ) -> Followed:
        shape = list(rows.shape[1:])
        if dim is not None:
            shape[dim] *= batch.shown
        self: Followed = Tensor._make_wrapper_subclass(
            cls, shape, dtype=rows.dtype, device=rows.device, requires_grad=rows.requires_grad
        )
        self._rows, self._batch, self._dim, self._how = rows, batch, dim, how
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @staticmethod
    def sealed(
        meta: Tensor, batch: Batch, device: torch.device, value: Callable[[], Tensor]
    ) -> Followed:
        """A value that several records make after ``backward()``; ``meta`` has its shape for a
        prime number of records.
        """
        shape = [n // _PRIME * batch.shown if n and n % _PRIME == 0 else n for n in meta.shape]
        self: Followed = Tensor._make_wrapper_subclass(
            Followed, shape, dtype=meta.dtype, device=device, requires_grad=False
        )
        self._rows, self._batch, self._dim, self._how = meta, batch, None, "sealed"
        self._value = value
        return self

    @staticmethod
    def of(whole: Tensor, batch: Batch) -> Followed:
        """A tensor with records in dimension 0."""
        return Followed(whole.unsqueeze(1), batch)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _ordinary(self._free()).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self._free().clone()

    def __iadd__(self, other: Any) -> Any:  # type: ignore[misc]
        return self + other

    def __isub__(self, other: Any) -> Any:  # type: ignore[misc]
        return self - other

    def __imul__(self, other: Any) -> Any:  # type: ignore[misc]
        return self * other

    def __itruediv__(self, other: Any) -> Any:  # type: ignore[misc]
        return self / other

    def _free(self) -> Tensor:
        """The ordinary tensor, once ``backward()`` is over."""
        if self._batch.is_open:
            raise self._batch.refuse("an open batch is copied", "loss-number", _AFTER)
        if self._how == "sealed":
            return self._value().detach().as_subclass(Derived)
        rows = self._rows.detach()
        rows = rows[:0] if self._batch.is_empty else rows
        if self._how is not None:
            rows = rows.float() if not rows.is_floating_point() else rows
            return (rows.mean(0) if self._how == "mean" else rows.sum(0)).as_subclass(Derived)
        assert self._dim is not None
        return rows.movedim(0, self._dim).flatten(self._dim, self._dim + 1).as_subclass(Derived)

    def _whole(self) -> Tensor:
        """All rows in dimension 0, where that is the dimension of the records."""
        return self._rows.flatten(0, 1)

    def _like(self, rows: Tensor) -> Followed:
        return Followed(rows, self._batch, self._dim, self._how)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        message = (
            f"{func} reached the batch below torch's Python functions (TorchScript, torch.func)"
        )
        for value in _flat((args, kwargs))[0]:
            if isinstance(value, Followed):
                raise value._batch.refuse(message)
        raise LossError(f"{message}. {_INSTEAD}.", code="loss-mixes")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name_of(func)
        with torch._C.DisableTorchFunctionSubclass():
            leaves, spec = _flat((args, kwargs))
            followed = [v for v in leaves if isinstance(v, Followed)]
            batch = next((f._batch for f in followed if f._batch.is_open), None)
            if batch is not None:
                try:
                    return _Operation(func, name, args, kwargs, leaves, spec, followed, batch).run()
                except CannotBeMapped as error:
                    raise batch.refuse(f"{name}: {error}".rstrip(".")) from None
                except DPBayesError:
                    raise
                except Exception as error:
                    if name == "backward":
                        raise
                    raise batch.refuse(f"{name}: {in_plain_words(error)}".rstrip(".")) from error
            if name in ("backward", "grad_fn"):
                raise LossError(
                    "this batch had its backward() already, or a later one was delivered: call"
                    " backward() once for each batch",
                    code="loss-twice",
                )
            free = [v._free() if isinstance(v, Followed) else v for v in leaves]
            if name in ("__format__", "__repr__", "__str__"):
                free = [v.as_subclass(Tensor) if isinstance(v, Derived) else v for v in free]
        args, kwargs = _rebuilt(free, spec)
        found = func(*args, **kwargs)
        _mark_written(func, args, kwargs)
        return found


_AFTER = "Compute with its values after backward()"


class _Operation:
    """One torch function on followed tensors of an open batch."""

    def __init__(
        self,
        function: Any,
        name: str,
        args: Any,
        kwargs: dict[str, Any],
        leaves: list[Any],
        spec: Any,
        followed: list[Followed],
        batch: Batch,
    ) -> None:
        self.function, self.name, self.args, self.kwargs = function, name, args, kwargs
        self.leaves, self.spec, self.followed, self.batch = leaves, spec, followed, batch

    def run(self) -> Any:
        name, first, batch = self.name, self.followed[0], self.batch
        if not _is_torchs(self.function):
            raise batch.refuse(f"{name} is not a function of torch")
        if name in _METADATA:
            return self.function(*self.args, **self.kwargs)
        if batch.refusal is not None:
            raise batch.refuse(batch.refusal)
        is_metric = self._is_running_metric()
        if not is_metric and any(f._batch is not batch for f in self.followed):
            raise batch.refuse("tensors of two batches meet: one of an earlier step comes back")
        require_no_modes()
        if name in ("requires_grad", "grad") and not isinstance(self.function, FunctionType):
            return self.function(first) if name == "requires_grad" else None
        if any(f.grad_fn is not None for f in self.followed):
            raise batch.refuse("a torch.autograd.Function was applied to the outputs")
        if name == "_is_all_true":  # asked by torch.distributions, to raise an error
            return torch.tensor(True)
        if self.function is torch.autograd.backward:
            if len(self.followed) != 1 or any(
                isinstance(v, Tensor) and v is not first for v in self.leaves
            ):
                raise batch.refuse("torch.autograd.backward() of several tensors")
            return self._backward()
        if isinstance(self.function, FunctionType) and self.function.__module__.startswith(
            "torch.autograd"
        ):
            raise batch.refuse(
                f"torch.autograd.{name} of the batch",
                "loss-backward",
                "Compute the gradient inside the model or loss= by torch.func.grad, and call"
                " loss.backward()",
            )
        if name == "backward":
            return self._backward(*self.args[1:], **self.kwargs)
        if name == "grad_fn":
            raise batch.refuse(
                "grad_fn of the batch is read, as torch.compile does",
                "loss-compiled",
                "Compile the model, torch.compile(net), and leave the loss as it is",
            )
        if name in ("__repr__", "__str__"):
            return f"Followed(shape={tuple(first.shape)}, values after backward())"
        if name in _NUMBERS:
            return self._number()
        if _is_in_place(name, self.kwargs) or self.kwargs.get("out") is not None:
            raise batch.refuse(
                f"{name} changes a tensor in place", "loss-in-place", "Write y = f(x) in its place"
            )
        if is_metric:
            self._freed()
            return self._sealed()
        self._check_constants()
        if name == "data":
            self.function, name = Tensor.detach, "detach"
        if any(f._how for f in self.followed):
            return self._on_reduced()
        if name in _TO_ELSEWHERE and isinstance(self.args[0], Followed) and len(self.followed) == 1:
            return first._like(self.function(first._rows, *self.args[1:], **self.kwargs))
        if self.kwargs.get("max_norm") is not None:
            raise batch.refuse("max_norm changes the weight that it is given in place")
        if name in _LOSSES and ("reduction" in self.kwargs or name == "gaussian_nll_loss"):
            return self._loss()
        if (
            name in ("mean", "sum")
            and len(self.args) == 1
            and not self.kwargs
            and first._rows.is_floating_point()
        ):
            return self._reduced(first._rows, name)
        if name in _ELEMENTWISE and self._are_alike():
            values = iter(f._rows for f in self.followed)
            leaves = [next(values) if isinstance(v, Followed) else v for v in self.leaves]
            args, kwargs = _rebuilt(leaves, self.spec)
            return first._like(self.function(*args, **kwargs))
        if name == "squeeze" and len(self.args) == 1 and not self.kwargs:
            keep = [d for d, size in enumerate(first.shape) if d != first._dim and size == 1]
            rows = first._rows.squeeze([d + 1 for d in keep])
            dim = None if first._dim is None else first._dim - sum(d < first._dim for d in keep)
            return Followed(rows, batch, dim)
        return self._mapped()

    def _is_running_metric(self) -> bool:
        """Whether reduced values without gradients meet those of earlier batches, as in a running
        mean. The result is sealed, so that it meets no loss and no model.
        """
        mine = [f for f in self.followed if f._batch is self.batch]
        others = [v for v in self.leaves if isinstance(v, Tensor) and not isinstance(v, Followed)]
        earlier = [f for f in self.followed if f._batch is not self.batch]
        return (
            (bool(earlier) or any(isinstance(v, Derived) for v in others))
            and not any(f._batch.is_open for f in earlier)
            and not any(v.requires_grad for v in others)
            and all(f._how is not None and not f._rows.requires_grad for f in mine)
        )

    def _freed(self) -> None:
        """Values of earlier batches as they are, lest a running mean keeps all of them."""
        self.leaves = [
            v._free() if isinstance(v, Followed) and v._batch is not self.batch else v
            for v in self.leaves
        ]
        self.followed = [v for v in self.leaves if isinstance(v, Followed)]

    def _check_constants(self) -> None:
        for value in self.leaves:
            if isinstance(value, Later):
                raise self.batch.refuse("a number of the batch comes back into the loss")
            if not isinstance(value, Tensor) or isinstance(value, Followed):
                continue
            if isinstance(value, Derived):
                raise self.batch.refuse(
                    f"{self.name} meets a tensor that was computed from other records, or from"
                    " several of this batch"
                )
            if value.requires_grad and torch.is_grad_enabled():
                raise self.batch.refuse(
                    f"{self.name} meets a tensor outside the model that requires grad",
                    "loss-outside",
                    "Return a parameter of the module, self.scale = nn.Parameter(torch.zeros(())),"
                    " beside the output: self.scale.expand(len(x)). For penalties take"
                    " prior_std= or log_prior=",
                )

    def _are_alike(self) -> bool:
        """Whether all tensors have the same rows in the same places, so that an operation on
        entries keeps records apart.
        """
        first = self.followed[0]
        return all(
            v._rows.shape == first._rows.shape and v._dim == first._dim
            if isinstance(v, Followed)
            else not isinstance(v, Tensor) or v.dim() == 0
            for v in self.leaves
        )

    def _number(self) -> Later:
        first = self.followed[0]
        if self.name != "item" or first._how is None:
            raise self.batch.refuse(
                f"{self.name} reads values of the batch before backward(), on which the loss could"
                " then depend",
                "loss-number",
                "Read them after backward()",
            )
        return Later(lambda: float(first._free()), self.batch)

    # -- losses of torch.nn.functional -------------------------------------------------------------

    def _loss(self) -> Any:
        """A loss whose mean has a divisor that shapes alone decide."""
        batch, name, kwargs = self.batch, self.name, self.kwargs
        how = kwargs.get("reduction", "mean")
        if kwargs.get("size_average") is not None or kwargs.get("reduce") is not None:
            raise batch.refuse(
                f"{name}: size_average and reduce are deprecated",
                "loss-option",
                'Write reduction="mean" or "sum"',
            )
        is_weighted = name in (*_OF_CLASSES, "mse_loss", "l1_loss")
        if is_weighted and kwargs.get("weight") is not None and how == "mean":
            raise batch.refuse(
                f"{name}(weight=) divides by the weights of the records in the batch",
                "loss-divisor",
                f"Write F.{name}(out, y, weight=w, reduction='none').mean()",
            )
        if name == "ctc_loss" and how == "mean":
            raise batch.refuse(
                "ctc_loss divides by the lengths of the targets",
                "loss-divisor",
                "Write F.ctc_loss(..., reduction='none').mean()",
            )
        if name == "ctc_loss":
            each = self._ctc(*self.args, **kwargs)
        elif name == "gaussian_nll_loss":
            each = _gaussian_nll(
                *self.args, **{k: v for k, v in kwargs.items() if k != "reduction"}
            )
        else:
            self.kwargs = {**kwargs, "reduction": "none"}
            self.leaves, self.spec = _flat((self.args, self.kwargs))
            if self._has_rows_of_its_own():
                each = self._on_whole()
            else:
                each = self._mapped()
        if how == "none":
            return each
        if how == "batchmean":
            rows = each._rows
            return self._reduced(rows.sum(tuple(range(2, rows.dim()))), "mean")
        return self._reduced(each._rows, how)

    def _ctc(
        self, log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, **options: Any
    ) -> Followed:
        """torch computes it record by record, with records in dimension 1."""
        values = (log_probs, targets, input_lengths, target_lengths)
        if not isinstance(log_probs, Followed) or log_probs._dim != 1 or log_probs.dim() != 3:
            raise self.batch.refuse("ctc_loss takes log_probs of shape (time, records, classes)")
        records = len(log_probs._rows)
        whole = []
        for value in values:
            if isinstance(value, (tuple, list)):
                value = torch.tensor(value)
            if isinstance(value, Followed):
                value = value._rows.movedim(0, value._dim or 0).flatten(
                    value._dim or 0, (value._dim or 0) + 1
                )
            elif is_constant(value, self.batch):
                value = value[:1].expand(records, *value.shape[1:])
            else:
                raise self.batch.refuse("ctc_loss: a target or length is not of this batch")
            whole.append(value)
        each = self.function(*whole, **{**options, "reduction": "none"})
        return Followed(each.unsqueeze(1), self.batch)

    def _has_rows_of_its_own(self) -> bool:
        """Whether the loss may run on all records at once: torch documents it as row by row for
        these shapes.
        """
        if len(self.followed) != 2 or any(f._dim != 0 for f in self.followed):
            return False
        first, second = self.followed
        if len(self.args) < 2 or self.args[0] is not first or self.args[1] is not second:
            return False
        mine, theirs = first._rows.shape, second._rows.shape
        if self.name in _OF_ENTRIES:
            return mine == theirs and self._are_alike()
        if self.name in _OF_CLASSES and len(mine) > 2:
            return theirs in (mine, (*mine[:2], *mine[3:]))
        return False

    def _on_whole(self) -> Followed:
        whole = [f._whole() for f in self.followed]
        wrong: Tensor | None = None
        if self.name in _OF_CLASSES and not whole[1].is_floating_point():
            # a record of no class counts as zero, and stops nobody else's step
            ignored = whole[1] == self.kwargs.get("ignore_index", -100)
            wrong = ((whole[1] < 0) | (whole[1] >= whole[0].shape[1])) & ~ignored
            whole[1] = whole[1].masked_fill(wrong, 0)
        values = iter(whole)
        leaves = [next(values) if isinstance(v, Followed) else v for v in self.leaves]
        args, kwargs = _rebuilt(leaves, self.spec)
        each: Tensor = self.function(*args, **kwargs)
        if wrong is not None:
            each = each.masked_fill(wrong, math.nan)
        first = self.followed[0]
        return Followed(each.unflatten(0, first._rows.shape[:2]), self.batch)

    def _reduced(self, rows: Tensor, how: str) -> Followed:
        each = rows.flatten(1)
        return Followed(each.mean(1) if how == "mean" else each.sum(1), self.batch, None, how)

    # -- any other function ------------------------------------------------------------------------

    def _mapped(self) -> Any:
        """The function of each record as a batch of one, and its shape for a whole batch."""
        tries, failure = [(place, c) for c in (False, True) for place in self._sizes()], None
        for place, has_constants in tries:
            on_meta, single = list(self.leaves), list(self.leaves)
            self._replace_size(on_meta, single, place)
            self._replace_positions(on_meta, single)
            if has_constants and not self._replace_constants(on_meta, single):
                continue
            try:
                shapes, is_same = _shapes_of(_Signature(self.function, self.spec, on_meta))
                break
            except Exception as error:
                failure = failure or error
        else:
            assert failure is not None
            if any(
                isinstance(v, Tensor)
                and not isinstance(v, Followed)
                and self.batch.shown in v.shape
                for v in self.leaves
            ):
                raise self.batch.refuse(
                    f"{self.name} meets a tensor with a row for each record that is not made of"
                    " the batch",
                    "loss-rows",
                    "Write torch.randn_like(x), torch.rand_like or torch.zeros_like, or pass a"
                    " loss= that draws its numbers for one record",
                ) from failure
            raise self.batch.refuse(f"{self.name}: {in_plain_words(failure)}") from failure
        if not is_same:
            return self._sealed()
        places = [k for k, v in enumerate(single) if isinstance(v, Followed)]
        out_spec: Any | None = None

        def one(rows: Sequence[Tensor]) -> Sequence[Tensor]:
            nonlocal out_spec
            values = list(single)
            for k, row in zip(places, rows, strict=True):
                values[k] = row
            args, kwargs = _rebuilt(values, self.spec)
            found, out_spec = _flat(self.function(*args, **kwargs))
            return found

        rows = [single[k]._rows for k in places]
        try:
            found = RecordMap(len(rows[0]), leaves=False)(one, rows)
        except Exception:
            if self._is_detached():
                return self._sealed()
            raise
        assert out_spec is not None
        if len(found) != len(shapes):
            raise self.batch.refuse(f"{self.name} gives another number of tensors for one record")
        results = [self._followed(t, m) for t, m in zip(found, shapes, strict=True)]
        if any(t is None for t in results):
            return self._sealed()
        return _rebuilt(results, out_spec)

    def _followed(self, rows: Tensor, meta: Tensor | None) -> Followed | None:
        """A result with the dimension of its records; None where it has none, or several."""
        if not isinstance(rows, Tensor) or meta is None:
            return None
        shape = meta.shape
        own = list(rows.shape[1:])
        dims = [d for d, size in enumerate(shape) if size and size % _PRIME == 0]
        if len(own) != len(shape):
            return None
        if len(dims) == 1:
            (dim,) = dims
            as_one = [size // _PRIME if d == dim else size for d, size in enumerate(shape)]
            return Followed(rows, self.batch, dim) if as_one == own else None
        if not dims and own == list(shape) and self.name in ("mean", "sum"):
            return Followed(rows, self.batch, None, self.name)
        return None

    def _replace_size(self, on_meta: list[Any], single: list[Any], place: int | None) -> None:
        """``len(x)`` written into a size is the number of records."""
        if place is not None:
            on_meta[place] = self.leaves[place] // self.batch.shown * _PRIME
            single[place] = self.leaves[place] // self.batch.shown

    def _sizes(self) -> list[int | None]:
        """Where the number of records may stand among sizes, the likeliest first; or nowhere."""
        if self.name not in _SIZES:
            return [None]
        places = [k for k, v in enumerate(self.leaves) if type(v) is int]
        may_be = [k for k in places if (v := self.leaves[k]) > 0 and v % self.batch.shown == 0]
        is_first = bool(may_be) and may_be[0] == places[0]
        return [*may_be[:1], None, *may_be[1:]] if is_first else [None, *may_be]

    def _replace_positions(self, on_meta: list[Any], single: list[Any]) -> None:
        """In ``out[torch.arange(len(out)), y]`` every record takes its own row."""
        if self.name != "__getitem__":
            return
        for k, v in enumerate(self.leaves):
            if (
                (v == range(self.batch.shown))
                if isinstance(v, range)
                else (
                    isinstance(v, Tensor)
                    and not isinstance(v, Followed)
                    and v.dtype == torch.long
                    and v.shape == (self.batch.shown,)
                    and torch.equal(v, torch.arange(len(v), device=v.device))
                )
            ):
                on_meta[k] = torch.empty(_PRIME, dtype=torch.long, device="meta")
                single[k] = torch.zeros(1, dtype=torch.long, device=self.followed[0].device)

    def _replace_constants(self, on_meta: list[Any], single: list[Any]) -> bool:
        """A tensor such as ``torch.ones(len(x), 3)``, with one and the same row for each record."""
        is_any = False
        for k, v in enumerate(self.leaves):
            if is_constant(v, self.batch):
                on_meta[k] = v[:1].to("meta").expand(_PRIME, *v.shape[1:])
                single[k], is_any = v[:1], True
        return is_any

    # -- after a reduction, and values that several records made -----------------------------------

    def _is_detached(self) -> bool:
        return not any(f._rows.requires_grad for f in self.followed)

    def _sealed(self) -> Any:
        """Metrics: without gradients any function will run on the values, once ``backward()`` is
        over. Until then only the shapes are known that it has for every number of records.
        """
        name, batch = self.name, self.batch
        if not self._is_detached() and torch.is_grad_enabled():
            raise batch.refuse(f"{name} mixes the records of the batch")
        try:
            metas, _ = _shapes_of(_Signature(self.function, self.spec, self.leaves))
        except Exception:
            metas = [None]
        shapes = [m for m in metas if m is not None]
        if len(shapes) != len(metas):
            raise batch.refuse(
                f"{name} reads values of the batch before backward()", "loss-number", _AFTER
            )
        found: list[Any] = []

        def results() -> list[Any]:
            if not found:
                leaves = [
                    _ordinary(v._free()) if isinstance(v, Followed) else v for v in self.leaves
                ]
                args, kwargs = _rebuilt(leaves, self.spec)
                found.extend(_flat(self.function(*args, **kwargs))[0])
            return found

        device = self.followed[0].device
        sealed = [
            Followed.sealed(m, batch, device, partial(lambda k: results()[k], k))
            for k, m in enumerate(shapes)
        ]
        return _rebuilt(sealed, _spec_of(self.function, self.spec, self.leaves))

    def _on_reduced(self) -> Any:
        """Reduced losses: multiples and sums of them are one loss."""
        name, batch, first = self.name, self.batch, self.followed[0]
        how = first._how
        if how == "sealed" or any(f._how != how for f in self.followed) or name not in _LINEAR:
            if how != "sealed" and name in _TO_ELSEWHERE:
                return first._like(self.function(first._rows, *self.args[1:], **self.kwargs))
            if not self._is_detached() and any(f._how is None for f in self.followed):
                raise batch.refuse(f"{name}: a mean or sum over the records meets records")
            if not self._is_detached():
                raise batch.refuse(
                    _AFTER_REDUCTION.get(name, f"{name} of a reduced loss"),
                    "loss-reduced",
                    _REDUCED,
                )
            return self._sealed()
        is_product = "mul" in name or "div" in name
        numbers = [v for v in self.leaves if isinstance(v, (int, float))]
        tensors = [v for v in self.leaves if isinstance(v, Tensor) and not isinstance(v, Followed)]
        if not is_product and all(v.dim() == 0 for v in tensors):  # torch.zeros(()) + loss
            numbers += [v.item() for v in tensors]
            tensors = []
        if tensors or (
            is_product and (len(self.followed) > 1 or not isinstance(self.args[0], Followed))
        ):
            if self._is_detached():
                return self._sealed()
            raise batch.refuse(
                "a reduced loss meets a tensor in a product or a sum, as in GradScaler",
                "loss-reduced",
                _REDUCED,
            )
        if ("add" in name or "sub" in name) and how == "sum" and any(numbers):
            if self._is_detached():
                return self._sealed()
            raise batch.refuse("a number is added to a sum over records", "loss-reduced", _REDUCED)
        if is_product and numbers == [batch.shown]:  # the number of records, as it is shown
            if "div" in name and how == "sum":
                return Followed(first._rows, batch, None, "mean")
            if "mul" in name and how == "mean" and batch.loss_reduction == "sum":
                return Followed(first._rows, batch, None, "sum")
        if is_product:
            leaves = [v._rows if isinstance(v, Followed) else v for v in self.leaves]
            args, kwargs = _rebuilt(leaves, self.spec)
            return first._like(self.function(*args, **kwargs))

        def one(rows: Sequence[Tensor]) -> Sequence[Tensor]:
            remaining = iter(rows)
            values = [next(remaining) if isinstance(v, Followed) else v for v in self.leaves]
            args, kwargs = _rebuilt(values, self.spec)
            return [self.function(*args, **kwargs)]

        rows = [f._rows for f in self.followed]
        (found,) = RecordMap(len(rows[0]), leaves=False)(one, rows)
        return Followed(found, batch, None, how)

    def _backward(
        self,
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        batch, loss = self.batch, self.followed[0]
        if gradient is not None or inputs is not None or create_graph or retain_graph:
            raise batch.refuse(
                "backward() has arguments",
                "loss-backward",
                "Call loss.backward() without arguments",
            )
        if loss._how not in ("mean", "sum") or loss.dim() > 0:
            raise batch.refuse(
                "backward() of a tensor that is not one mean or sum over the records",
                "loss-vector",
                "Call loss.mean().backward()",
            )
        if torch.is_anomaly_enabled():
            raise batch.refuse(
                "anomaly detection is on, where one record's gradient ends the step",
                "loss-backward",
                "Leave out torch.autograd.set_detect_anomaly",
            )
        if not loss._rows.requires_grad or batch.loss_reduction is None:
            raise batch.refuse(
                "the loss does not depend on the parameters of the private model",
                "loss-constant",
                "Compute it from net(x) in training mode, without torch.no_grad()",
            )
        if loss._how != batch.loss_reduction:
            raise batch.refuse(
                f"the loss is a {loss._how} over the records, and make_private was told a"
                f" {batch.loss_reduction}",
                "loss-reduction",
                f'Write make_private(..., loss_reduction="{loss._how}"), or reduce by'
                f" .{batch.loss_reduction}()",
            )
        try:
            # of each record's own loss; nothing outside the model receives a gradient
            loss._rows.sum().backward(inputs=list(batch.leaves))
        finally:
            batch.close()


_REDUCED = (
    "Multiply a loss by fixed Python numbers, and add losses up, before or after the mean. What"
    " else a record's loss needs, compute before the mean, for each record"
)
_AFTER_REDUCTION = {
    "isnan": "isnan(loss) before backward() (a record that is not finite counts as zero)",
    "isfinite": "isfinite(loss) before backward() (a record that is not finite counts as zero)",
}


def shape_of(t: Tensor) -> Tensor:
    """A tensor without values, of the shape and type of one record in dimension 0."""
    rows = t._rows[:1].flatten(0, 1) if isinstance(t, Followed) else t[:1] if t.dim() else t
    return torch.zeros((), dtype=t.dtype, device=t.device).expand(rows.shape)


def is_constant(value: Any, batch: Batch) -> bool:
    """Whether a tensor has the number of rows that the batch shows, all equal."""
    return (
        isinstance(value, Tensor)
        and not isinstance(value, (Followed, Derived))
        and value.dim() > 0
        and len(value) > 0
        and len(value) % batch.shown == 0
        and bool((value == value[:1]).all())
    )


def _gaussian_nll(input: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6) -> Any:
    """torch's own raises an error where a record's variance is negative."""
    with torch._C._EnableTorchFunction():
        var = var.clamp(min=eps).detach() + (var - var.detach())
        loss = 0.5 * (var.log() + (input - target) ** 2 / var)
        return loss + 0.5 * math.log(2 * math.pi) if full else loss


# -- what a function does to a batch, by its shapes ------------------------------------------------


class _Signature:
    """A function and the shapes of its arguments; equal ones are looked at once."""

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


def _on_meta(value: Any) -> Any:
    if isinstance(value, Followed):
        if value._how == "sealed":
            return value._rows
        shape = list(value._rows.shape[1:])
        if value._dim is not None:
            shape[value._dim] *= _PRIME
        return torch.empty(shape, dtype=value._rows.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    return value.to("meta") if isinstance(value, Tensor) else value


@lru_cache(4096)
def _shapes_of(signature: _Signature) -> tuple[list[Tensor | None], bool]:
    """Shapes of the results for a prime number of records, and whether the function of a batch is
    that of its records.
    """

    args, kwargs = _rebuilt([_on_meta(v) for v in signature.leaves], signature.spec)
    with torch.no_grad():
        found = _flat(signature.function(*args, **kwargs))[0]
    metas = [t if isinstance(t, Tensor) else None for t in found]
    leaves, signature.leaves = signature.leaves, []  # the cache keeps no records
    shapes = [() if t is None else tuple(t.shape) for t in metas]
    return metas, _is_row_by_row(signature.function, signature.spec, leaves, shapes)


def _spec_of(function: Any, spec: Any, leaves: list[Any]) -> Any:
    """How the results of a function are nested."""
    args, kwargs = _rebuilt([_on_meta(v) for v in leaves], spec)
    with torch.no_grad():
        return _flat(function(*args, **kwargs))[1]


def _is_row_by_row(
    function: Any, spec: Any, leaves: list[Any], shapes: list[tuple[int, ...]]
) -> bool:
    """Whether a function of synthetic records is its function of each one as a batch of one. So
    that nobody gets another loss than written; privacy does not rest on it.
    """
    if any(isinstance(v, Tensor) and v.device.type == "meta" for v in leaves):
        return True
    if any(isinstance(v, Followed) and v._how is not None for v in leaves):
        return False
    generator = torch.Generator().manual_seed(0)

    def synthetic(value: Followed) -> Tensor:
        shape = (_ROWS_TRIED, *value._rows.shape[1:])
        if value._rows.is_floating_point():
            made = torch.rand(shape, generator=generator) * 0.8 + 0.1
        else:
            made = torch.randint(0, 2, shape, generator=generator)
        return made.to(value._rows.dtype).to(value._rows.device)

    made = {k: synthetic(v) for k, v in enumerate(leaves) if isinstance(v, Followed)}

    def results(values: dict[int, Tensor], records: int) -> list[Tensor]:
        new = [
            v // _PRIME * records if type(v) is int and v > 0 and v % _PRIME == 0 else v
            for v in leaves
        ]
        for k, v in values.items():
            new[k] = v
        args, kwargs = _rebuilt(new, spec)
        found = _flat(function(*args, **kwargs))[0]
        return [t.double() for t in found if isinstance(t, Tensor)]

    batch = {
        k: v.movedim(0, _dim(leaves[k])).flatten(_dim(leaves[k]), _dim(leaves[k]) + 1)
        for k, v in made.items()
    }
    devices = {v.device for v in made.values() if v.device.type == "cuda"}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=list(devices)):
            together, again = results(batch, _ROWS_TRIED), results(batch, _ROWS_TRIED)
            if not all(
                torch.equal(a, b) or bool((a != a).any())
                for a, b in zip(together, again, strict=True)
            ):
                return True  # it draws random numbers
            alone = [results({k: v[i] for k, v in made.items()}, 1) for i in range(_ROWS_TRIED)]
    except Exception:
        return True
    for t, shape, *rows in zip(together, shapes, *alone, strict=True):
        dims = [d for d, size in enumerate(shape) if size and size % _PRIME == 0]
        stacked = torch.stack(rows)
        if len(dims) == 1:
            expected = [stacked.movedim(0, dims[0]).flatten(dims[0], dims[0] + 1)]
        else:
            expected = [stacked.mean(0), stacked.sum(0)]
        if not any(
            e.shape == t.shape and torch.allclose(t, e, 1e-4, 1e-4, equal_nan=True)
            for e in expected
        ):
            return False
    return True


def _dim(value: Followed) -> int:
    return value._dim or 0
