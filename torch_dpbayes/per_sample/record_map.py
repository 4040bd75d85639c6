"""A model run as a map over records: no record's forward or backward pass can see another record.

``torch.func.vmap`` turns a program for one record into one for a batch. What the program asks for
(a mean over dimension 0, an order of its rows, how many there are) it is told of that one record,
whatever stands in the batch. The exception are torch's own layers, which book-keeping has to see on
the whole batch: they leave the map (:meth:`RecordMap.on_batch`), and compute every row by itself.

Nothing here is a test on made-up records. What is not prevented is deliberate: functorch's own
unwrapping (``torch.func.debug_unwrap``), a dispatch mode around the whole model, torch functions
switched off by a private name, TorchScript that calls an operator of the caller's.
"""

from __future__ import annotations

import functools
import gc
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_gradtrackingtensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ..errors import DPBayesError

# functorch's own steps, without what torch.func.vmap adds around them: a tenth of a millisecond for
# every layer
try:
    from torch._C._functorch import (
        _add_batch_dim,
        _remove_batch_dim,
        _vmap_decrement_nesting,
        _vmap_increment_nesting,
        maybe_current_level,
        maybe_get_bdim,
        pop_dynamic_layer_stack,
        push_dynamic_layer_stack,
    )

    HAS_STEPS = True
except ImportError:  # pragma: no cover - another version of torch
    HAS_STEPS = False

Run = Callable[..., Tensor]


SAVED_TENSORS = (
    "hooks on saved tensors (saved_tensors_hooks, save_on_cpu, checkpoint) see all records of a"
    " batch at once: leave them out"
)
_INSIDE_TRANSFORM = "the model is called inside a torch.func transform: call it by itself"


class CannotBeMapped(DPBayesError, RuntimeError):
    """The model's program cannot be run for one record at a time."""

    def __init__(self, message: str, *, code: str = "model-map") -> None:
        super().__init__(message, code=code)


_TORCHS_WORDS = {
    "calling .item() on a Tensor": (
        "it reads a number of the records (item(), one_hot without num_classes): compute with"
        " tensors, pass num_classes"
    ),
    "must override the setup_context staticmethod": (
        "it calls an autograd.Function of the old style, as checkpoint(use_reentrant=True) does,"
        " which cannot run for one record: leave it out"
    ),
    "would mutate a captured Tensor": (
        "it changes its input in place, or another tensor from outside: write x = x * 2 instead of"
        " x *= 2"
    ),
    "different inplace randomness": (
        "it draws random numbers into a tensor of its own (bernoulli_, normal_), which is one for"
        " all records: write torch.rand(...) < p, or alike"
    ),
    "requires_grad_() outside": (
        "it calls requires_grad_(), or autograd.functional: take torch.func.grad or vjp"
    ),
}


def is_of_maps(error: Exception) -> bool:
    """Whether torch speaks of its transforms."""
    return any(theirs in str(error) for theirs in _TORCHS_WORDS) or "vmap" in str(error)


def in_plain_words(error: Exception) -> str:
    """What an error inside a map says: torch's own are about its transforms."""
    text = str(error) or repr(error)
    plain = (ours for theirs, ours in _TORCHS_WORDS.items() if theirs in text)
    return next(plain, text.splitlines()[0])


class InnerTransform(CannotBeMapped):
    """The map cannot be left inside a ``torch.func`` transform of the model's own."""

    def __init__(self) -> None:
        super().__init__("what runs on whole batches is called inside a torch.func transform")


_LOOKS = frozenset(
    (
        *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__complex__),
        *(
            Tensor.item,
            Tensor.tolist,
            Tensor.numpy,
            Tensor.__array__,
            Tensor.__contains__,
            Tensor.__format__,
        ),
        *(
            Tensor.is_nonzero,
            torch.is_nonzero,
            Tensor.equal,
            torch.equal,
            Tensor.allclose,
            torch.allclose,
        ),
    )
)


_GRAD_FN = frozenset((Tensor.grad_fn.__get__,))  # type: ignore[union-attr]
_RESIZES = frozenset((Tensor.resize_, Tensor.resize_as_, torch.resize_as_))
# What an argument of a torch function is as a rule; of the rest, each is looked at.
_ORDINARY = frozenset(
    (
        *(Tensor, nn.Parameter, bool, int, float, str, type(None), slice, type(...)),
        *(torch.Size, torch.dtype, torch.device, torch.memory_format, torch.layout),
    )
)
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_TORCHS_OPERATORS = frozenset(("aten", "prim", "prims", "torchvision"))


class KeptTensors(DPBayesError, RuntimeError):
    """Tensors of a finished map that somebody still has: in the next one, every record would
    see what they hold of all.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        text: str = "a tensor made of the records outlives the forward pass",
    ) -> None:
        super().__init__(text, code="model-kept")
        self.tensors = list(tensors)


class OutsideTensor(CannotBeMapped):
    """A tensor that requires grad is used inside a map in which it takes no part."""

    def __init__(self, function: str, tensor: Tensor) -> None:
        super().__init__(
            f"{function} uses a tensor outside the model that requires grad, which would be trained"
            " without noise. Make it a parameter of the module, self.scale ="
            " nn.Parameter(torch.zeros(())), and return it beside the output",
            code="loss-outside",
        )
        self.tensor = tensor


class RecordMap:
    """A map over the records of one batch.

    Args:
        records: n, the number of rows that every mapped tensor has in dimension 0.
        leaves: whether fused operations run on the batch; not where gradients will be taken inside
            a map, as they then would draw other random numbers.
        use_steps: whether functorch's own steps are taken, in place of ``torch.func.vmap`` and an
            ``autograd.Function`` with a ``vmap`` rule. Both do the same.
    """

    def __init__(self, records: int, *, leaves: bool = True, use_steps: bool = HAS_STEPS) -> None:
        self.records = records
        self._leaves = leaves
        self._use_steps = use_steps
        self._level: int | None = None
        self.error: Exception | None = None  # of a layer, which the model may have caught
        self._seen: list[weakref.ref[Tensor]] = []
        _load_rules()

    def __call__(
        self, function: Callable[[Sequence[Tensor]], Sequence[Tensor]], tensors: Sequence[Tensor]
    ) -> list[Tensor]:
        """``function`` of every record's slices of ``tensors``; results have records in dimension
        0.

        Random numbers differ between records. Hooks on saved tensors are off inside, for they would
        see, and could mix, what the backward pass of all records needs.
        """
        require_no_modes()
        no_hooks = torch.autograd.graph.disable_saved_tensors_hooks(SAVED_TENSORS)
        mode = _OfOneRecord(self if self._leaves else None, self.see, self._own)
        with no_hooks, without_looks(), mode:
            found = self.again(function, tensors)
        if mode.error is not None or self.error is not None:
            raise CannotBeMapped(
                "it catches an error of a torch function, which one record may cause for all: leave"
                " out the try"
            )
        return found

    def again(
        self, function: Callable[[Sequence[Tensor]], Sequence[Tensor]], tensors: Sequence[Tensor]
    ) -> list[Tensor]:
        """As in a call, for what follows from an earlier one and runs nothing of the model's."""
        if not self._use_steps:
            return self._by_vmap(function, tensors)
        if maybe_current_level() is not None:
            raise CannotBeMapped(_INSIDE_TRANSFORM)
        self._level = level = _vmap_increment_nesting(self.records, "different")
        try:
            inside = [_add_batch_dim(t, 0, level) for t in tensors]
            self.see(inside)
            results = function(inside)
            return [_remove_batch_dim(t, level, self.records, 0) for t in results]
        finally:
            self._level = None
            _vmap_decrement_nesting()

    def on_batch(self, run: Run, tensors: Sequence[Tensor]) -> Tensor:
        """Leave the map for one call: ``run`` is given ``tensors`` with records in dimension 0, and
        gives such a tensor.

        A tensor that does not depend on the record is repeated for each, so that its gradient has a
        row for each.

        Raises:
            InnerTransform: the call comes from another transform inside the map.
        """
        if any(is_gradtrackingtensor(t) or is_batchedtensor(_within(t)) for t in tensors):
            raise InnerTransform
        if not self._use_steps:
            anchor, operands = self._anchor, list(tensors)
            return _OnBatch.apply(run, anchor, *operands)
        level = self._level
        if level is None or maybe_current_level() != level:
            raise InnerTransform
        inside = [
            (get_unwrapped(t), maybe_get_bdim(t)) if is_batchedtensor(t) else (t, -1)
            for t in tensors
        ]
        stack = pop_dynamic_layer_stack()
        try:
            with torch._C.DisableTorchFunction():
                result = run(*(self._with_rows(t, None if dim < 0 else dim) for t, dim in inside))
        except Exception as error:
            self.error = error
            raise
        finally:
            push_dynamic_layer_stack(stack)
        result = _add_batch_dim(result, 0, level)
        self.see(result)
        return result

    def see(self, result: Any) -> None:
        """Note tensors that no record may leave behind."""
        if isinstance(result, Tensor):
            if _is_of_records(result):
                self._seen.append(weakref.ref(result))
        elif isinstance(result, (tuple, list)):
            for part in result:
                self.see(part)

    def require_nothing_kept(self) -> None:
        """Raise if a tensor of the finished map is still alive."""
        alive: list[Tensor] = []
        for generation in (None, 0, 2):  # most of what is in reference cycles is young
            if generation is not None:
                alive.clear()
                gc.collect(generation)
            alive = [t for reference in self._seen if (t := reference()) is not None]
            if not alive:
                return
        raise KeptTensors(alive)

    def _own(self, empty: Tensor) -> Tensor:
        """Memory for each record, into which a model may write or draw."""
        if self._level is None or _is_of_records(empty):
            return empty
        rows = empty.new_empty(self.records, *empty.shape)
        while is_gradtrackingtensor(rows):
            rows = get_unwrapped(rows)
        own = _add_batch_dim(rows, 0, self._level)
        return own.clone() if is_gradtrackingtensor(empty) else own  # a clone may be written to

    def _with_rows(self, t: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return t.expand(self.records, *t.shape)
        return t if dim == 0 else t.movedim(dim, 0)

    def _by_vmap(
        self, function: Callable[[Sequence[Tensor]], Sequence[Tensor]], tensors: Sequence[Tensor]
    ) -> list[Tensor]:
        def one(anchor: Tensor, *slices: Tensor) -> tuple[Tensor, ...]:
            self._anchor = anchor
            self.see(slices)
            try:
                return tuple(function(slices))
            finally:
                del self._anchor

        device = tensors[0].device if tensors else None
        anchor = torch.zeros(self.records, device=device)
        return list(torch.func.vmap(one, randomness="different")(anchor, *tensors))


def _within(t: Tensor) -> Tensor:
    return get_unwrapped(t) if is_batchedtensor(t) else t


def _is_of_records(t: Tensor) -> bool:
    """Whether a tensor stands for one of each record; it may be tracked by transforms inside."""
    while is_gradtrackingtensor(t):
        t = get_unwrapped(t)
    return is_batchedtensor(t)


class _OnBatch(torch.autograd.Function):
    """Leaves ``torch.func.vmap`` by its public way: only the ``vmap`` rule ever runs, on what
    stands behind the map.
    """

    @staticmethod
    def forward(run: Run, anchor: Tensor, *tensors: Tensor) -> Tensor:
        raise InnerTransform

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, run: Run, anchor: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, int]:
        n = info.batch_size
        rows = [
            t.expand(n, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip(tensors, in_dims[2:], strict=True)
        ]
        return run(*rows), 0


@functools.cache
def _load_rules() -> None:
    """torch.func.vmap has batching rules that come with its first call."""
    torch.func.vmap(torch.clone)(torch.zeros(1))


@contextmanager
def without_looks() -> Iterator[None]:
    """Let ``transformers`` build every attention mask, and ``checkpoint`` call its function.

    The former looks at values of tokens to save work, and does not while it is traced; in a map it
    cannot, where each record may have another answer. The latter would run a part of the model
    again in the backward pass, where the map is over.
    """
    before = [
        (home, name, getattr(home, name), instead)
        for of, name, instead in _REPLACED
        if (home := sys.modules.get(of)) is not None and hasattr(home, name)
    ]
    for home, name, _, instead in before:
        setattr(home, name, instead)
    try:
        yield
    finally:
        for home, name, function, _ in before:
            setattr(home, name, function)


def _always(*_: object) -> bool:
    return True


class _PlainCheckpoint:
    """In the place of ``CheckpointFunction``."""

    @staticmethod
    def apply(function: Callable[..., Any], _preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


def _no_checkpoint(*_: Any, **__: Any) -> Iterator[None]:
    yield


_REPLACED = (
    ("transformers.masking_utils", "is_tracing", _always),
    ("transformers.modeling_utils", "is_tracing", _always),
    ("torch.utils.checkpoint", "CheckpointFunction", _PlainCheckpoint),
    ("torch.utils.checkpoint", "_checkpoint_without_reentrant_generator", _no_checkpoint),
    ("torch.utils.checkpoint", "_checkpoint_without_reentrant_generator_impl", _no_checkpoint),
)


@contextmanager
def one_record_only() -> Iterator[None]:
    """Torch functions as inside a map, around a ``torch.func`` transform that runs the same
    program.
    """
    no_hooks = torch.autograd.graph.disable_saved_tensors_hooks(SAVED_TENSORS)
    with no_hooks, without_looks(), _OfOneRecord(None, None):
        yield


def _plain_bag(
    indices: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Callable[[], Tensor] | None:
    """``F.embedding_bag`` by operations that vmap has rules for: torch's own would run for one
    record after another, with a warning at each call. None where its options are refused anyway.
    """
    has_wrong_weights = per_sample_weights is not None and mode != "sum"
    if mode not in ("sum", "mean", "max") or has_wrong_weights:
        return None
    if max_norm is not None or scale_grad_by_freq or indices.numel() == 0:
        return None

    def bags() -> Tensor:
        found = F.embedding(indices, weight)  # (bags, places, numbers)
        if per_sample_weights is not None:
            found = found * per_sample_weights.unsqueeze(-1)
        is_there: Tensor | None = None
        if padding_idx is not None:
            is_there = indices != padding_idx % len(weight)
        if offsets is not None:  # one list of places, cut at these
            ends = torch.cat([offsets[1:], torch.full_like(offsets[:1], len(indices))])
            starts, ends = (offsets[:-1], offsets[1:]) if include_last_offset else (offsets, ends)
            place = torch.arange(len(indices), device=indices.device)
            is_inside = (place >= starts.unsqueeze(1)) & (place < ends.unsqueeze(1))
            is_there = is_inside if is_there is None else is_inside & is_there
            found = found.unsqueeze(0)
        if is_there is None:
            if mode == "max":
                return found.max(1).values
            return found.mean(1) if mode == "mean" else found.sum(1)
        counts = is_there.sum(1).unsqueeze(-1)
        if mode == "max":
            largest = torch.where(is_there.unsqueeze(-1), found, -math.inf).max(1).values
            return torch.where(counts > 0, largest, 0.0)
        total = torch.where(is_there.unsqueeze(-1), found, 0.0).sum(1)
        return total / counts.clamp(min=1) if mode == "mean" else total

    return bags


class _OfOneRecord(TorchFunctionMode):
    """What torch functions do inside the map where vmap by itself would be slow, or unsafe.

    Args:
        record_map: the map that fused operations leave; None: they are replaced by plain ones.
        see: what results are shown to; None outside of a map, where nothing is hidden.
        own: gives each record memory of its own; None outside of a map.
    """

    def __init__(
        self,
        record_map: RecordMap | None,
        see: Callable[[Any], None] | None,
        own: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._map, self._see, self._own = record_map, see, own
        self.error: Exception | None = None  # of a function, which the model may have caught
        self._dispatch_modes = _len_torch_dispatch_stack()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._see is not None:
            self._require_nothing_hidden(func, args, kwargs)
        if func is F.scaled_dot_product_attention:
            if self._map is None or not _are_aligned(*args, **kwargs):
                with self:
                    return _plain_attention(*args, **kwargs)
            try:
                return self._attention(self._map, *args, **kwargs)
            except InnerTransform:
                with self:
                    return _plain_attention(*args, **kwargs)
        if func is Tensor.__repr__ and _is_of_records(args[0]):
            t = args[0]
            return f"tensor(of one record, size={tuple(t.shape)}, dtype={t.dtype})"
        if func in _LOOKS and _is_of_records(args[0]):
            raise CannotBeMapped(
                f"it reads a number of the records ({func.__name__}): compute with tensors"
                " (torch.where)"
            )
        if func in _GRAD_FN and _is_of_records(args[0]):
            raise CannotBeMapped(
                "it takes grad_fn of a tensor made of the records, where a hook"
                " (grad_fn.register_hook) would not run: leave it out"
            )
        if func in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
            raise CannotBeMapped(
                f"it puts a hook on a tensor ({func.__name__}), which would not run"
            )
        # asked for by gradient checkpointing; gradients are taken anyway
        if func in _REQUIRE_GRAD and not is_gradtrackingtensor(args[0]):
            return None
        if func is Tensor.requires_grad_ and is_batchedtensor(args[0]):
            return args[0]
        if func is F.embedding and (padding := _padding_of(*args, **kwargs)) is not None:
            tokens, weight, place = padding
            with self:
                found = F.embedding(tokens, weight)
                return torch.where((tokens == place).unsqueeze(-1), found.detach(), found)
        if (layers := _RECURRENT.get(func)) is not None and len(args) == 9:
            with self:
                return layers(*args)
        if func in _EMPTY:
            empty = func(*args, **kwargs)
            return empty if self._own is None else self._own(empty)
        if (cell := _CELLS.get(func)) is not None:
            with self:
                return cell(*args, **kwargs)
        if func is F.embedding_bag and (plain := _plain_bag(*args, **kwargs)) is not None:
            with self:
                return plain()
        if func is F.multi_head_attention_forward:  # its fused attention is not seen from here
            return _with_plain_attention(func, args, kwargs)
        if isinstance(func, torch._ops.HigherOrderOperator) and args and isinstance(args[0], type):
            _require_torchs_own(args[0])
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self.error = error
            raise
        if self._see is not None:
            if isinstance(result, (Tensor, tuple, list)) and torch.is_grad_enabled():
                if getattr(func, "__name__", "") != "__get__":  # seen where its result is used
                    _require_no_outside(func, (*args, *kwargs.values()))
            self._see(result)
        return result

    def _require_nothing_hidden(self, func: Any, args: Any, kwargs: Any) -> None:
        """Refuse what would run below the map, where tensors hold all records, or out of sight."""
        if _len_torch_dispatch_stack() > self._dispatch_modes:
            raise CannotBeMapped(
                "it enters a dispatch mode (TorchDispatchMode), which sees all records of a batch"
                " at once: leave it out"
            )
        if kwargs or not _ORDINARY.issuperset(map(type, args)):
            _require_ordinary(func, (*args, *kwargs.values()))
        if kwargs.get("generator") is not None:
            raise CannotBeMapped(
                "it draws from a generator of its own, which would give each record other numbers:"
                " draw fixed numbers in __init__, into a buffer"
            )
        if kwargs.get("max_norm") is not None:
            raise CannotBeMapped("max_norm changes the weight of an embedding in place")
        if func in _RESIZES:
            raise CannotBeMapped(
                f"it changes the size of a tensor in memory ({func.__name__}), where other records"
                " lie beside it: make a new tensor, as F.pad does"
            )
        if isinstance(func, _OPERATORS):
            _require_torchs_operator(func)

    def _attention(
        self,
        record_map: RecordMap,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *rest: Any,
        **options: Any,
    ) -> Tensor:
        """Fused attention has no batching rule on every device; its rows are those of the batch."""
        has_mask = attn_mask is not None
        is_one_row = all(t.dim() == 4 and t.shape[0] == 1 for t in (query, key, value))
        if has_mask and is_one_row:
            assert attn_mask is not None
            is_one_row = attn_mask.dim() < 4 or attn_mask.shape[0] == 1

        def run(*tensors: Tensor) -> Tensor:
            q, k, v = (t.squeeze(1) if is_one_row else t for t in tensors[:3])
            mask = tensors[3] if has_mask else None
            if mask is not None:  # (n, [1,] [heads,] positions, positions)
                mask = mask.squeeze(1) if is_one_row and mask.dim() == 5 else mask
                mask = (
                    mask
                    if mask.dim() >= q.dim()
                    else mask.unflatten(0, (-1, *[1] * (q.dim() - mask.dim())))
                )
            out = F.scaled_dot_product_attention(q, k, v, mask, *rest, **options)
            return out.unsqueeze(1) if is_one_row else out

        return record_map.on_batch(
            run, [query, key, value, *([attn_mask] if attn_mask is not None else [])]
        )


def require_no_modes() -> None:
    """Refuse modes of the caller's: they see tensors that hold all records."""
    if _len_torch_dispatch_stack() > 0:
        raise CannotBeMapped(
            "it runs under a dispatch mode (TorchDispatchMode), which sees all records of a batch:"
            " leave that mode before the model is called"
        )
    for mode in _get_current_function_mode_stack():
        if type(mode).__module__.partition(".")[0] not in ("torch", "torch_dpbayes"):
            raise CannotBeMapped(
                f"it runs under {type(mode).__name__}, a TorchFunctionMode which may see all"
                " records at once: leave that mode before the model is called"
            )


class attention_as_in_maps(TorchFunctionMode):
    """Torch's attention layer computes as it does in a map, so that dropout draws the same
    numbers.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.multi_head_attention_forward:
            return _with_plain_attention(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _with_plain_attention(func: Any, args: Any, kwargs: Any) -> Any:
    with sdpa_kernel(SDPBackend.MATH):
        return func(*args, **kwargs)


def _lstm_cell(
    input: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Any = None,
    b_hh: Any = None,
) -> tuple[Tensor, Tensor]:
    gates = F.linear(input, w_ih, b_ih) + F.linear(hx[0], w_hh, b_hh)
    i, f, g, o = gates.chunk(4, -1)
    cell = f.sigmoid() * hx[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _gru_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
) -> Tensor:
    r, z, n = F.linear(input, w_ih, b_ih).chunk(3, -1)
    hr, hz, hn = F.linear(hx, w_hh, b_hh).chunk(3, -1)
    update = (z + hz).sigmoid()
    return (1 - update) * (n + (r + hr).sigmoid() * hn).tanh() + update * hx


def _rnn_cell(nonlinearity: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def cell(
        input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
    ) -> Tensor:
        return nonlinearity(F.linear(input, w_ih, b_ih) + F.linear(hx, w_hh, b_hh))

    return cell


# Recurrent cells, by operations that vmap has rules for.
_CELLS: dict[Any, Callable[..., Any]] = {
    torch.lstm_cell: _lstm_cell,
    torch.gru_cell: _gru_cell,
    torch.rnn_tanh_cell: _rnn_cell(torch.tanh),
    torch.rnn_relu_cell: _rnn_cell(torch.relu),
}


def _padding_of(
    tokens: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, Tensor, int] | None:
    """The row without gradient of a table with a copy for each record: vmap gives it one."""
    if padding_idx is None or max_norm is not None or not _is_mapped(weight):
        return None
    return tokens, weight, padding_idx % len(weight)


def _recurrent(cell: Callable[..., Any], *, has_memory: bool) -> Callable[..., Any]:
    """torch.lstm, gru, rnn_tanh and rnn_relu of one record, step by step."""

    def run(
        input: Tensor,
        hx: Any,
        weights: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        states: tuple[Tensor, ...] = tuple(hx) if has_memory else (hx,)
        directions = 2 if bidirectional else 1
        each = len(weights) // (num_layers * directions)
        steps = list(input.transpose(0, 1) if batch_first else input)
        last: list[Any] = []
        for layer in range(num_layers):
            found = []
            for direction in range(directions):
                place = layer * directions + direction
                w_ih, w_hh, *rest = weights[place * each : (place + 1) * each]
                biases, projection = (rest[:2], rest[2:]) if has_biases else ([], rest)
                state = tuple(s[place] for s in states)
                outputs = []
                for x in reversed(steps) if direction else steps:
                    new = cell(x, state if has_memory else state[0], w_ih, w_hh, *biases)
                    state = tuple(new) if has_memory else (new,)
                    if projection:
                        state = (F.linear(state[0], projection[0]), state[1])
                    outputs.append(state[0])
                found.append(outputs[::-1] if direction else outputs)
                last.append(state)
            steps = [torch.cat(at, -1) for at in zip(*found, strict=True)]
            if layer < num_layers - 1 and dropout > 0 and train:
                steps = list(F.dropout(torch.stack(steps), dropout))
        output = torch.stack(steps, 1 if batch_first else 0)
        return (output, *(torch.stack(s) for s in zip(*last, strict=True)))

    return run


_RECURRENT: dict[Any, Callable[..., Any]] = {
    torch.lstm: _recurrent(_lstm_cell, has_memory=True),
    torch.gru: _recurrent(_gru_cell, has_memory=False),
    torch.rnn_tanh: _recurrent(_CELLS[torch.rnn_tanh_cell], has_memory=False),
    torch.rnn_relu: _recurrent(_CELLS[torch.rnn_relu_cell], has_memory=False),
}
_REQUIRE_GRAD = frozenset((Tensor.requires_grad.__set__,))  # type: ignore[attr-defined]
_EMPTY = frozenset((torch.empty, torch.empty_like, Tensor.new_empty))


def _are_aligned(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
) -> bool:
    """Whether records stay in dimension 0 of all operands when they are broadcast with one
    another.
    """
    is_small = attn_mask is None or attn_mask.dim() <= query.dim()
    return query.dim() == key.dim() == value.dim() and is_small


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(QKᵀ/√d + mask)·V, operation by operation, each of which has a rule for vmap and
    for gradients.
    """
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scores = (
        query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    )
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    if attn_mask is None or is_causal:
        weights = scores.softmax(-1)
    else:  # what sees nothing gets zeros from torch's own, NaN from softmax
        is_blind = (scores == -math.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(is_blind, 0.0).softmax(-1).masked_fill(is_blind, 0.0)
    return F.dropout(weights, dropout_p, dropout_p > 0) @ value


def _require_torchs_own(function: type) -> None:
    """Refuse an ``autograd.Function`` of the caller's: it, or one inside it, may say itself
    what it does to a whole batch.
    """
    if (
        issubclass(function, torch.autograd.Function)
        and function is not _OnBatch
        and not function.__module__.startswith("torch.")
    ):
        raise CannotBeMapped(
            f"{function.__name__} is an autograd.Function of its own, whose rules for whole batches"
            " are not seen"
        )


def _require_ordinary(func: Any, values: Iterable[Any]) -> None:
    """Refuse what would run code of the caller's below the map, or out of its sight: tensors with
    code of their own, and functions that a torch function calls.
    """
    for value in values:
        if type(value) in _ORDINARY:
            continue
        if isinstance(value, Tensor):
            raise CannotBeMapped(
                f"it computes with a {type(value).__name__}, a class of tensors with code of its"
                " own, or of values of other batches: take plain tensors"
            )
        if isinstance(value, (tuple, list)):
            _require_ordinary(func, value)
        elif callable(value) and not isinstance(value, type) and _OnBatch not in values:
            name = getattr(func, "__name__", str(func))
            raise CannotBeMapped(
                f"it gives {name} a function to call, in which nothing is seen of what it does:"
                " call it yourself"
            )


def _require_no_outside(func: Any, values: Iterable[Any]) -> None:
    """Refuse a tensor that requires grad and takes no part in the map: its gradient would be
    neither clipped nor noisy.
    """
    for value in values:
        if isinstance(value, Tensor):
            if value.requires_grad and not _is_mapped(value):
                raise OutsideTensor(getattr(func, "__name__", str(func)), value)
        elif type(value) in (tuple, list):
            _require_no_outside(func, value)


def _is_mapped(t: Tensor) -> bool:
    return is_batchedtensor(t) or is_gradtrackingtensor(t)


def _require_torchs_operator(func: Any) -> None:
    """Refuse an operator of the caller's. It may have a rule of its own for whole batches; without
    one it is called for one record after another, and may keep something from each for the next.
    """
    if str(func).partition(".")[0] not in _TORCHS_OPERATORS:
        raise CannotBeMapped(
            f"operator {func} is not torch's own: what it does to whole batches, or keeps of one"
            " record for the next, is not seen"
        )
