"""Ordinary tensors that were computed from records, and tensors of the model that must not change.

After ``backward()`` the values of a batch are ordinary tensors. They must not be used in a later
loss, model or parameter, because other records would then bypass the clipping. They are
:class:`Derived` tensors. Torch's dispatcher passes every operation with one of them to
``__torch_dispatch__``, also operations of ``torch.func``, TorchScript and autograd, so the results
are marked, too. If they are written into a tensor, its memory is marked, which all its views share.

Writes into buffers and frozen parameters are refused (:class:`FixedTensors`): such values depend on
records and have no noise, but they change later gradients and are saved with the model's state.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import (
    DisableTorchFunctionSubclass,
    DispatchKey,
    _DisableTorchDispatch,
    _dispatch_keys,
    _dispatch_tls_is_dispatch_key_excluded,
    _is_torch_function_enabled,
    _storage_Use_Count,
)
from torch._tensor import _convert
from torch.overrides import get_default_nowrap_functions
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import LossError, StepError

WRITTEN = (
    "values of a batch, neither clipped nor noisy, are written to a parameter or buffer of the"
    " private model: write only public values; only the optimizer may change parameters"
)
# attributes that mark a storage
_MARK, _PRIVATE = "_dpbayes_holds_records", "_dpbayes_private"
OF_DATA_SET = "_dpbayes_private_data"  # the memory of a private data set
_ORDINARY = {Tensor, nn.Parameter}
_DENSE = (torch.strided, torch.jagged)
# Functions that return a tensor's values to Python.
LOOKS = frozenset(
    (
        *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__complex__),
        *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__contains__),
        *(Tensor.__format__, Tensor.is_nonzero, torch.is_nonzero, Tensor.equal, torch.equal),
        *(Tensor.allclose, torch.allclose),
    )
)
TWICE = (
    "backward() already ran for this batch, or a later batch was delivered: call backward() once"
    " for each batch"
)
# They write into running statistics by way of a copy.
_THROUGH_COPIES = (torch.instance_norm, torch.nn.functional.instance_norm)
_READ = (
    "torch reads a value of a batch as a number (torch.tensor([t]), torch.full(size, t),"
    " alpha=t), so its origin is lost. Write torch.stack([t, t]); use t.item() only to look at"
    " the value"
)


class Derived(Tensor):
    """An ordinary tensor that was computed from records. Results computed from it are Derived."""

    is_of_batch = True

    @classmethod
    @torch.compiler.disable
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for t in {*types, *map(type, args)} - _ORDINARY:  # operators omit types after the first
            if issubclass(t, Tensor) and not issubclass(t, Derived):
                return t.__torch_function__(func, types, args, kwargs)  # a followed tensor's
        if func in LOOKS or func is Tensor.__repr__:
            if _dispatch_tls_is_dispatch_key_excluded("Python"):  # torch.tensor([t]) does this
                raise LossError(_READ, code="loss-mixes")
            args = [as_plain(v) if isinstance(v, Derived) else v for v in args]
            return func(*args, **(kwargs or {}))
        if func is Tensor.backward and not args[0].requires_grad:
            raise LossError(TWICE, code="loss-twice")
        if func is Tensor.__setitem__:  # torch reads a single index as a number
            _mark(args[0])
        is_seen = not any(map(_is_named_only, (*args, *(kwargs or {}).values())))
        is_seen = is_seen and func not in _THROUGH_COPIES
        with DisableTorchFunctionSubclass(), nullcontext() if is_seen else _Seen():
            found = func(*args, **(kwargs or {}))
            _require_dense(found)
            return found if func in get_default_nowrap_functions() else _convert(found, Derived)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not all(issubclass(t, Derived) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        reads = torch.ops.aten._local_scalar_dense.default  # noqa: SLF001
        if func is reads and _is_torch_function_enabled():
            raise LossError(_READ, code="loss-mixes")  # torch reads it as a plain argument
        with _DisableTorchDispatch():
            if names := _names_written(func):
                given = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)}
                given.update(kwargs)
                if given.get("training", True):
                    for name in names:
                        _mark(given.get(name))
            return _derived(func(*args, **kwargs))

    def __copy__(self) -> Tensor:
        return self.detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return as_plain(self).__reduce_ex__(protocol)


class _DerivedParameter(nn.Parameter, Derived):
    """A parameter that values of records were written into."""

    __torch_function__ = Derived.__torch_function__
    __reduce_ex__ = nn.Parameter.__reduce_ex__

    def __deepcopy__(self, memo: Any) -> Tensor:
        memo[id(self)] = copy = nn.Parameter(as_plain(self).detach().clone(), self.requires_grad)
        _mark(copy)
        return copy


class _Seen(TorchDispatchMode):
    """Passes every operator to :class:`Derived`, for tensors for which torch's dispatcher does
    not.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Derived.__torch_dispatch__(func, (), args, kwargs)


def _is_named_only(value: Any) -> bool:
    """Whether a tensor, or one in a list, became Derived when it was written into: the dispatcher
    does not know its class.
    """
    if isinstance(value, (tuple, list)):
        return any(map(_is_named_only, value))
    return isinstance(value, Derived) and not _dispatch_keys(value).has(DispatchKey.Python)


def derived(t: Tensor) -> Derived:
    """The same values, marked as computed from records."""
    with DisableTorchFunctionSubclass(), _DisableTorchDispatch():
        if (storage := storage_of(t)) is not None:
            setattr(storage, _MARK, True)
        return t.as_subclass(Derived)


def as_plain(t: Tensor) -> Tensor:
    """The same values as an ordinary tensor of torch; its memory stays marked."""
    with DisableTorchFunctionSubclass(), _DisableTorchDispatch():
        return t.as_subclass(Tensor)


def holds_records(t: Tensor) -> bool:
    """Whether a tensor is followed, was computed from records, or shares memory with one that
    was.
    """
    return hasattr(type(t), "is_of_batch") or hasattr(storage_of(t), _MARK)


def is_private(t: Tensor) -> bool:
    """Whether a tensor :func:`holds_records`, or shares memory with a private data set."""
    return holds_records(t) or hasattr(storage_of(t), OF_DATA_SET)


def _derived(found: Any) -> Any:
    if isinstance(found, Tensor):
        _require_dense(found)
        is_known = isinstance(found, Derived) or isinstance(found, nn.Parameter)
        return found if is_known else derived(found)
    return type(found)(map(_derived, found)) if isinstance(found, (tuple, list)) else found


def _require_dense(found: Any) -> None:
    if isinstance(found, Tensor) and found.layout not in _DENSE:
        raise LossError(
            f"values of a batch become a tensor of layout {found.layout}, whose parts are no"
            " longer marked as computed from records: use dense tensors, or NumPy arrays that no"
            " later step uses",
            code="loss-mixes",
        )


@lru_cache(2048)
def _names_written(func: Any) -> list[str]:
    """The arguments that an operator writes into; torch's schemas omit the running statistics."""
    return [
        a.name
        for a in func._schema.arguments
        if a.name in ("running_mean", "running_var")
        or (a.alias_info and a.alias_info.is_write)
        or func.namespace == "c10d"  # collectives omit some, too
    ]


def _mark(written: Any) -> None:
    """Mark a tensor, and all that share its memory, as computed from records."""
    if isinstance(written, (tuple, list)):
        for t in written:
            _mark(t)
    storage = storage_of(written) if isinstance(written, Tensor) else None
    if hasattr(storage, _PRIVATE) and not hasattr(storage, _MARK):
        raise StepError(WRITTEN, code="model-written")
    if not isinstance(written, Tensor) or hasattr(storage, _MARK):
        return
    owners = [written] if written._base is None else [written, written._base]
    if storage is not None:
        setattr(storage, _MARK, True)
        if _storage_Use_Count(storage._cdata) > len(owners) + 1:  # + 1 is the storage's object
            owners = [
                t
                for t in gc.get_objects()
                if issubclass(type(t), Tensor) and storage_of(t) is storage
            ]
    for t in owners:
        if type(t) is Tensor:
            t.__class__ = Derived
        elif type(t) is nn.Parameter:
            t.__class__ = _DerivedParameter


def storage_of(t: Tensor) -> Any:
    """The storage of a tensor; None if it has none, such as a sparse one."""
    with DisableTorchFunctionSubclass():
        try:
            return t.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None


# -- buffers and frozen parameters ----------------------------------------------------------------

_CHANGED = (
    "{!r} changed while training: buffers and frozen parameters would contain data without noise."
    " Keep statistics (GroupNorm, not BatchNorm) and counters out of the module, as plain Python"
    " numbers, and load an earlier state."
)
_LONGEST_WAIT = 64  # steps


class FixedTensors:
    """Copies of a module's buffers and frozen parameters, and a check that they are unchanged.

    Each check compares identities and torch's version counters. Some writes do not change the
    counters (``.data``, the running statistics of ``batch_norm``). So values are compared at check
    1, 2, 4, … 64, then at every 64th, and whenever identity or version differ: a tensor with equal
    values is unchanged, also if it was moved to another device or dtype. Until the first batch is
    delivered, all values may change.

    Args:
        module: the model.

    Attributes:
        values: copies of the tensors by their names in the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.values: dict[str, Tensor] = {}
        self._module = module
        self._is_training = False
        self._counted: list[tuple[int, int]] | None = None
        self._record()

    def begin(self) -> None:
        """Called before the loader's first batch; from now on nothing may change."""
        if not self._is_training:
            self._is_training = True
            self._record()
            self._module.__dict__.pop("_dpbayes_start", None)
            self._module.__dict__["_dpbayes_buffers"] = self.values  # checked later

    def look_closely(self) -> None:
        """Compare values in the next check: parameters were frozen or unfrozen, or moved."""
        self._counted = None

    def require_unchanged(self) -> None:
        """Raise if a tensor changed, or if a parameter has values of a batch."""
        counts = self._counts()
        self._looks += 1
        is_due = not self._looks % _LONGEST_WAIT or not self._looks & (self._looks - 1)
        if is_due or counts is None or counts != self._counted:
            self._compare_values()
            self._watch()

    def _counts(self) -> list[tuple[int, int]] | None:
        """Identities and version counters of the tensors; None if there is a tensor of inference
        mode, which has no counter.
        """
        counts, is_counted = [], True
        for home in self._homes:
            for t in home.values():
                if t is None:
                    continue
                if holds_records(t):
                    raise StepError(WRITTEN, code="model-written")
                if isinstance(t, nn.Parameter) and t.requires_grad:
                    continue
                if t.is_inference():
                    is_counted = False
                else:
                    counts.append((id(t), t._version))
        return counts if is_counted else None

    def _compare_values(self) -> None:
        """Raise if values differ; parameters may be frozen, unfrozen or moved."""
        now = _fixed(self._module)
        parameters = {name for name, _ in self._module.named_parameters(remove_duplicate=False)}
        for name in {**self.values, **now}:
            before, t = self.values.get(name), now.get(name)
            if before is None or t is None:
                is_same = name in parameters and (t is None or name in self._names)
            else:
                is_same = same_values(before, t)
            if not is_same:
                raise StepError(_CHANGED.format(name), code="model-buffer")
            if t is None:
                del self.values[name]
            elif before is None or (before.dtype, before.device) != (t.dtype, t.device):
                self.values[name] = t.detach().clone()

    def _record(self) -> None:
        self.values.clear()
        self.values.update((name, t.detach().clone()) for name, t in _fixed(self._module).items())
        self._names = {name for name, _ in self._module.named_parameters(remove_duplicate=False)}
        self._looks = 0
        self._watch()

    def _watch(self) -> None:
        layers = self._module.modules()
        self._homes = [home for layer in layers for home in (layer._buffers, layer._parameters)]
        # an id is unique only while its tensor is alive
        self._alive = [t for home in self._homes for t in home.values() if t is not None]
        for t in self._alive:  # a write of a batch's values into it is refused
            if (storage := storage_of(t)) is not None:
                setattr(storage, _PRIVATE, True)
        self._counted = self._counts()


def same_values(before: Tensor, now: Tensor) -> bool:
    """Whether two tensors have the same values in the device and dtype of the second; NaN equals
    NaN.
    """
    if before.shape != now.shape:
        return False
    before = before.to(now)
    return torch.equal(before, now) or bool(
        ((before == now) | ((before != before) & (now != now))).all()
    )


def _fixed(module: nn.Module) -> dict[str, Tensor]:
    """Buffers and frozen parameters under all their names: moving a model may separate shared
    tensors.
    """
    parameters = module.named_parameters(remove_duplicate=False)
    return {
        **dict(module.named_buffers(remove_duplicate=False)),
        **{name: p for name, p in parameters if not p.requires_grad},
    }
