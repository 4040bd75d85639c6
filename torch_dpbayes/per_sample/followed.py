# ruff: noqa: SLF001 - this module has both Followed and Batch
"""Tensors of a batch that have a shape, but no values until ``backward()``.

The batches of the private loader and the outputs of the private model are :class:`Followed`
tensors. They have no storage and no autograd graph; an attribute has the values, one row for each
record. Only torch's Python functions use the values (:mod:`torch_dpbayes.per_sample.operations`).
Other code (TorchScript, C++, ``torch.func``, DLPack, NumPy) reaches ``__torch_dispatch__``, which
raises an error, or finds no storage.

The number of records in a batch is private, too. Until ``backward()`` every followed tensor shows
the expected batch size instead. Afterwards the values and the number of records can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import LossError
from ..noise import PrivateRandomness
from .derived import TWICE, Derived, as_plain, derived, is_private

INSTEAD = (
    "Compute the loss for each record alone: make_private(..., loss=fn) with fn(output, target) of"
    " one record, and net.private_loss(x, y).backward() in the loop"
)
# What to write instead, by the code of the error.
REMEDIES = {
    "loss-mixes": INSTEAD,
    "loss-number": "Read it after backward()",
    "loss-backward": "Call loss.backward() without arguments, on one loss",
    "loss-in-place": (
        "Write y = f(x) instead (for distributions: loss=); torchvision's transforms belong into"
        " the data set; for label_smoothing_factor of Trainer use compute_loss_func= with"
        " F.cross_entropy(..., label_smoothing=)"
    ),
    "loss-reduced": (
        "After the mean you may multiply a loss by fixed Python numbers and add losses (no"
        " GradScaler; values that are not finite count as zero). Compute all else before it"
    ),
    "loss-rows": (
        "Write torch.randn_like(x), torch.rand_like or torch.zeros_like, or pass a loss= that draws"
        " its numbers for one record"
    ),
    "loss-outside": (
        "Run other networks under torch.no_grad(); make a learned number a parameter of the"
        " module and return it beside the output: self.scale.expand(len(x)); for penalties use"
        " prior_std="
    ),
    "loss-option": 'Write reduction="mean" or "sum"',
    "loss-vector": "Call loss.mean().backward()",
    "loss-constant": (
        "Compute it from net(x) in training mode, with trainable parameters, and without"
        " torch.no_grad(), argmax or comparisons"
    ),
    "model-input": "Pass the loader's batch, or tensors computed from it record by record",
}
_NO_VALUES = "the batch has no values before backward(), and t.data = x makes t part of the batch"
_HIDDEN_WEIGHT = "the library cannot see weight= of l1_loss"
_WEIGHT_INSTEAD = "Write (F.l1_loss(out, y, reduction='none') * w).mean()"
_storage_address: Any = torch._C._storage_address  # type: ignore[attr-defined]
# The number of records of meta tensors: a dimension that it divides is that of the records.
PRIME = 10007


@dataclass(slots=True, eq=False)
class Batch:
    """One delivered batch. It is open until its ``backward()`` is over.

    Args:
        shown: the number of records that followed tensors show, a public constant.
        run: runs a torch function on followed tensors of this batch while it is open.
        randomness: random numbers for functions on followed tensors.
        spare: the number of rows behind those of the records, which count as none.

    Attributes:
        refusal: why a use of the batch was refused; every further use is then refused, too.
        loss_reduction: the required reduction of the loss, from the model's last pass.
        leaves: the tensors that may receive a gradient, from the model's last pass.
    """

    shown: int
    run: Callable[..., Any]
    randomness: PrivateRandomness
    spare: int = 0
    is_open: bool = True
    refusal: str | None = None
    loss_reduction: str | None = None
    leaves: Sequence[Tensor] = ()

    def close(self) -> None:
        """From now on values can be read, and must not be used in a loss."""
        self.is_open, self.leaves = False, ()

    def refuse(self, what: str, code: str = "loss-mixes", remedy: str | None = None) -> LossError:
        """The error of this use, and of every later one."""
        self.refusal = self.refusal or what
        return LossError(f"{what}. {remedy or REMEDIES[code]}.", code=code)


class Followed(Tensor):
    """A tensor of a batch; all its operations run for each record alone.

    Args:
        rows: the values, (records, \\*shape of one record as a batch of one); for a reduced loss
            (records, \\*shape); for a sealed value a meta tensor of its shape.
        batch: the batch that it belongs to.
        dim: the dimension of the records in the shape that it shows; None after a reduction.
        how: ``"mean"`` or ``"sum"`` after a reduction over the records, ``"sealed"`` for a value
            computed from several records.
        value: returns a sealed value after ``backward()``.
    """

    _rows: Tensor
    _batch: Batch
    _dim: int | None
    _how: str | None
    _value: Callable[[], Tensor]
    _freed: Tensor | None = None
    is_of_batch = True

    @staticmethod
    def __new__(
        cls,
        rows: Tensor,
        batch: Batch,
        dim: int | None = 0,
        how: str | None = None,
        value: Callable[[], Tensor] | None = None,
        device: torch.device | None = None,
    ) -> Followed:
        if value is None:
            _, *shape = rows.shape
        else:
            shape = [n // PRIME * batch.shown if n and n % PRIME == 0 else n for n in rows.shape]
        if dim is not None:
            shape[dim] *= batch.shown
        options: dict[str, Any] = {"dtype": rows.dtype, "device": device or rows.device}
        self: Followed = Tensor._make_wrapper_subclass(
            cls, shape, **options, requires_grad=rows.requires_grad
        )
        torch._C._set_storage_data_ptr_access_error_msg(_storage_address(self), _NO_VALUES)
        self._rows, self._batch, self._dim, self._how = rows, batch, dim, how
        if value is not None:
            self._value = value
        return self

    @classmethod
    @torch.compiler.disable  # a backend would receive the values
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        with torch._C.DisableTorchFunctionSubclass():
            leaves, spec = flatten((args, kwargs))
            for v in leaves:
                if isinstance(v, Followed) and v._batch.is_open:
                    if name == "l1_loss" and Tensor in types and Tensor not in map(type, leaves):
                        raise v._batch.refuse(_HIDDEN_WEIGHT, "loss-divisor", _WEIGHT_INSTEAD)
                    return v._batch.run(func, name, args, kwargs, leaves, spec, v._batch)
            if name in ("backward", "grad_fn"):
                raise LossError(TWICE, code="loss-twice")
            free = [v.free() if isinstance(v, Followed) else v for v in leaves]
        args, kwargs = unflatten(free, spec)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        message = (
            f"{func} reached the batch below torch's Python functions (TorchScript, torch.func)"
        )
        for value in flatten((args, kwargs))[0]:
            if isinstance(value, Followed) and value._batch.is_open:
                raise value._batch.refuse(message)
        raise LossError(f"{message}. After backward() pass x.detach().", code="loss-mixes")

    @torch.compiler.disable
    def backward(self, *args: Any, **kwargs: Any) -> Any:  # without torch's dispatch
        batch = self._batch
        if not batch.is_open:
            raise LossError(TWICE, code="loss-twice")
        with torch._C.DisableTorchFunctionSubclass():
            return batch.run(
                Tensor.backward, "backward", (self, *args), kwargs, [self], None, batch
            )

    # loss += 1 is loss = loss + 1
    __iadd__ = Tensor.__add__
    __isub__ = Tensor.__sub__
    __imul__ = Tensor.__mul__
    __itruediv__ = Tensor.__truediv__

    def __reduce_ex__(self, protocol: Any) -> Any:
        return as_plain(self.free()).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.free().clone()

    def free(self) -> Tensor:
        """The ordinary tensor, after ``backward()``. It is a copy in separate memory, because norms
        and sums of this step are computed from the rows.
        """
        if self._batch.is_open:
            raise self._batch.refuse("a batch is copied before backward()", "loss-number")
        if self._freed is None:
            # inside a torch.func transform the copy would belong to it, and lose the mark
            with temporarily_clear_interpreter_stack():
                self._freed = self._copied()
        return self._freed

    def _copied(self) -> Tensor:
        if self._how == "sealed":
            return derived(self._value().detach())
        rows = self._rows.detach()
        rows = rows[: len(rows) - self._batch.spare]
        if self._how is not None:
            found = rows.mean(0) if self._how == "mean" else rows.sum(0)
            return derived(found)
        return derived(_in_place(rows, self._dim or 0).clone())

    def whole(self) -> Tensor:
        """The values, with all records in the dimension of the records."""
        return _in_place(self._rows, self._dim or 0)

    def like(self, rows: Tensor) -> Followed:
        """Other values with the same records in the same dimension."""
        return Followed(rows, self._batch, self._dim, self._how)


def _in_place(rows: Tensor, dim: int) -> Tensor:
    return rows.movedim(0, dim).flatten(dim, dim + 1)


def is_constant(value: Any, batch: Batch) -> bool:
    """Whether a tensor has as many rows as the batch shows (or a multiple), all equal."""
    return (
        isinstance(value, Tensor)
        and not is_private(value)
        and value.dim() > 0
        and len(value) > 0
        and len(value) % batch.shown == 0
        and bool((value == value[:1]).all())
    )


def shape_of(t: Tensor) -> Tensor:
    """A tensor of zeros, with the shape and type of one record in dimension 0."""
    rows = t._rows[:1].flatten(0, 1) if isinstance(t, Followed) else t[:1] if t.dim() else t
    return torch.zeros((), dtype=t.dtype, device=t.device).expand(rows.shape)


@lru_cache(2048)
def name_of(function: Any) -> str:
    """The name of a torch function, or of the attribute that it gets or sets."""
    name: str = getattr(function, "__name__", str(function))
    if name == "__get__":
        return str(function.__self__.__name__)
    return f"{name} {function.__self__.__name__}" if name == "__set__" else name


def flatten(value: Any) -> tuple[list[Any], Any]:
    """The leaves of nested values, and their nesting; fast for arguments of a function."""
    if type(value) is tuple and len(value) == 2 and type(value[0]) is tuple:
        args, kwargs = value
        leaves = [*args, *(kwargs or {}).values()]
        if _PLAIN.issuperset(map(type, leaves)):
            return leaves, (len(args), tuple(kwargs or ()))
    return tree_flatten(value)


def unflatten(leaves: Sequence[Any], spec: Any) -> Any:
    """The inverse of :func:`flatten`."""
    if type(spec) is tuple:
        count, names = spec
        return tuple(leaves[:count]), dict(zip(names, leaves[count:], strict=True))
    return tree_unflatten(leaves, spec)


# Types that contain no other values.
_PLAIN = frozenset(
    (
        *(Tensor, Derived, Followed, nn.Parameter, int, float, bool, str, type(None)),
        *(torch.dtype, torch.device),
    )
)
