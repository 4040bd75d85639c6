# ruff: noqa: SLF001 - torch's private state of a map
"""A model run as a map over records: no record's forward or backward pass can see another record.

``torch.func.vmap`` turns a program for one record into one for a batch. In it a mean over dimension
0, the order of rows and their number are those of one record. Only torch's own layers, which
book-keeping needs on the whole batch, leave the map (:meth:`RecordMap.call_batched`); they compute
every row by itself.

Deliberate ways out are not prevented: functorch's unwrapping (``torch.func.debug_unwrap``), other
threads, switching torch functions off by a private name, and TorchScript, which no mode sees.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from operator import methodcaller
from types import MethodWrapperType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# functorch's own steps instead of torch.func.vmap, which takes 0.1 ms more for every layer
from torch._C import _functorch as functorch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_gradtrackingtensor
from torch.distributions import Distribution
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import DPBayesError
from ..processes import Lock
from .derived import LOOKS, Derived, is_private, storage_of
from .followed import Followed, name_of
from .function_kinds import IN_PYTHON, flags_of, is_in_place, is_torchs
from .memory import OfOneMap, require_seen, shared, unwrapped
from .nested import map_tensors, of_those_that_run
from .plain_functions import FUNCTIONS

SELECTS = "a mask selects entries, so their number depends on the data"
_TORCHS_WORDS = {
    "register_meta function for torch.nonzero": SELECTS,
    "higher order operator doesn't work": "it calls torch.cond: write torch.where(condition, a, b)",
    "dynamic shape": (
        "it selects entries, whose number depends on the record: multiply by a mask"
        " (docs/how_to/usual_networks.md)"
    ),
    "calling .item() on a Tensor": (
        "it reads a number from the records (item(), one_hot without num_classes): compute with"
        " tensors, pass num_classes"
    ),
    "must override the setup_context staticmethod": (
        "it calls an old-style autograd.Function, which cannot run for one record: pass"
        " use_reentrant=False to checkpoint(), and write others with torch operations"
    ),
    "Batch norm got a batched tensor": (
        "its statistics depend on the records: leave out track_running_stats, or use GroupNorm"
    ),
    "different inplace randomness": (
        "it draws random numbers into a tensor that all records share (bernoulli_, normal_):"
        " write torch.rand(...) < p, or similar"
    ),
    "fallback path doesn't work on out=": "it computes into out=, like spectral_norm: leave it out",
    **dict.fromkeys(
        ("would mutate a captured Tensor", "is not possible because there exists a Tensor"),
        "it changes its input or an outside tensor in place: write x = f(x) (transformers:"
        " use_cache=False)",
    ),
    **dict.fromkeys(
        ("requires_grad_() outside", "element 0 of tensors does not require grad"),
        "it calls requires_grad_(), or a function of torch.autograd: use torch.func.grad or vjp",
    ),
}

OfOne = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # takes the slices of one record
_seed_of = methodcaller("initial_seed")
_SEEDED = (
    "it calls torch.manual_seed, so the random numbers of a place in the batch are known: seed the"
    " program, not the model"
)
_DISPATCH = "it enters a TorchDispatchMode, which sees all records of a batch: leave it out"
# Words in torch's errors about programs, which are not in errors about a record's values.
_OF_PROGRAMS = ("vmap", "same device", "dtype", "scalar type", "same shape", "shapes cannot")

torch.func.vmap(torch.clone)(torch.zeros(1))  # loads the batching rules
_compiler: Any = torch.compiler
_lock, _flags = Lock(), list[tuple[bool, bool]]()  # before each running map, of all threads
_trace_hooks = torch._C._autograd._saved_tensors_hooks_set_tracing


class CannotBeMapped(DPBayesError, RuntimeError):
    """The model's program cannot be run for one record at a time."""

    def __init__(self, message: str, *, code: str = "model-map") -> None:
        super().__init__(message, code=code)


class InnerTransform(CannotBeMapped):
    """The map cannot be left inside a ``torch.func`` transform of the model's own."""


class OutsideTensor(CannotBeMapped):
    """A tensor outside the map that requires grad is used inside the map."""

    def __init__(self, function: str, tensor: Tensor) -> None:
        super().__init__(
            f"{function} uses a tensor outside the model that requires grad, and would train it"
            " without noise. Make it a parameter of the module, self.scale ="
            " nn.Parameter(torch.zeros(())), and return it beside the output",
            code="loss-outside",
        )
        self.tensor = tensor


def in_plain_words(error: Exception) -> str:
    """Explain an error inside a map in plain words: torch's own message is about its transforms."""
    text = str(error) or repr(error)
    plain = (ours for theirs, ours in _TORCHS_WORDS.items() if theirs in text)
    return next(plain, text.splitlines()[0])


def without_values(error: Exception) -> str:
    """The same, but an error that a record's values may have caused is not quoted."""
    text = in_plain_words(error)
    is_ours = isinstance(error, DPBayesError) or text not in str(error)
    if is_ours or any(words in text for words in _OF_PROGRAMS):
        return text
    return f"it fails on the values of a record ({type(error).__name__})"


class RecordMap(OfOneMap, TorchFunctionMode):
    """A map over the records of one batch. It replaces torch functions for which vmap by itself
    would be slow or unsafe.

    Args:
        records: n, the number of rows of every mapped tensor in dimension 0.
        is_random: whether records may draw random numbers. They must not if these numbers could
            depend on a record's place in the batch.
        is_second_way: whether the program may write records into constants that it makes
            (``torch.zeros``), each of which then has memory for each record, and may read single
            random numbers (``torch.rand(1)``), each of which is then drawn once for all records.
        is_part: whether a new record may move others to another pass of the same batch.
    """

    def __init__(
        self,
        records: int,
        *,
        is_random: bool = True,
        is_second_way: bool = False,
        is_part: bool = False,
    ) -> None:
        self._is_second_way, self._is_part = is_second_way, is_part
        self.records, self._randomness = records, "different" if is_random else "error"
        self._error: Exception | None = None  # an error inside; the model may have caught it

    def __call__(
        self, function: OfOne, tensors: Sequence[Tensor], copies: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Apply ``function`` to every record's slices of ``tensors``, and of ``copies`` that share
        one memory; each record has its own random numbers. Results have records in dimension 0.
        """
        require_no_modes()
        rows, found = [*map(Tensor.contiguous, tensors)], list[Tensor]()
        # an earlier map could have left rows in memory around these
        rows = [t if storage_of(t).nbytes() == t.nbytes else t.clone() for t in rows]
        rows += map(shared, copies)
        self._streams = torch.default_generator, *torch.cuda.default_generators
        self._seeds = [*map(_seed_of, self._streams)]
        with as_traced():
            self._level = level = functorch._vmap_increment_nesting(self.records, self._randomness)
            torch._C._push_on_torch_function_stack(self)
            try:
                self._known = {}
                for t in function([*map(self._put_inside, rows)]):
                    if _len_torch_dispatch_stack() > 0:
                        raise CannotBeMapped(_DISPATCH)
                    self.require(t)
                    whole = functorch._remove_batch_dim(t, level, self.records, 0)
                    found.append(whole if is_batchedtensor(t) else whole.clone())  # own memory
            finally:
                self._level = None
                is_seen = torch._C._pop_torch_function_stack() is self
                functorch._vmap_decrement_nesting()
        if not is_seen:
            raise CannotBeMapped("it enters or leaves a TorchFunctionMode: write a with block")
        if [*map(_seed_of, self._streams)] != self._seeds:
            raise CannotBeMapped(_SEEDED)
        if self._error is not None:
            raise CannotBeMapped(
                "it catches an error of a torch function, which one record may cause for all:"
                " remove the try block"
            )
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_inner := functorch.maybe_current_level() != self._level:
            require_seen()
        if _len_torch_dispatch_stack() > 0:
            raise CannotBeMapped(_DISPATCH)
        if [*map(_seed_of, self._streams)] != self._seeds:
            raise CannotBeMapped(_SEEDED)
        # here the mode does not see code of the caller's: none may run
        if flags_of(kind := type(func)) & IN_PYTHON and not _OPERATOR & {*map(id, type.mro(kind))}:
            raise CannotBeMapped("it calls an object that is no function of torch")
        outside = _outside(func, (*args, *kwargs, *kwargs.values()), self)
        # it has a meaning for whole batches only
        if "memory_format" in kwargs and kwargs["memory_format"] in _LAYOUTS:
            kwargs = {name: v for name, v in kwargs.items() if name != "memory_format"}
        if is_special := not _is_harmless(func) or "generator" in kwargs:
            if isinstance(func, _OPERATORS) and str(func) == "transformers.grouped_mm_fallback":
                func = F.grouped_mm  # it replaces this function while torch traces
            _require_nothing_hidden(func, args, kwargs)
        try:
            result = self._special(func, args, kwargs) if is_special else None
            if result is None:
                result = func(*args, **kwargs)
        except Exception as error:
            result = self._of_those_that_run(func, args, kwargs)
            if result is None:
                self._error = error
                raise
        is_ordered = func is F.scaled_dot_product_attention  # it is a view of what is in order
        given = (result,) if is_ordered else (*args, *kwargs.values())
        result = self.known(result, given, is_inner=is_inner)
        # for an attribute, the function that uses it is checked
        if outside and type(func) is not MethodWrapperType and torch.is_grad_enabled():
            # its gradient would be neither clipped nor noisy
            trained = [t for t in outside if t.requires_grad]
            if trained and isinstance(result, (Tensor, tuple, list)):
                raise OutsideTensor(name_of(func), trained[0])
        return result

    def call_batched(self, run: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
        """Leave the map for one call of ``run``: its arguments ``tensors`` and its results have
        records in dimension 0. A result is NaN for a record for which ``run`` fails.

        A tensor that does not depend on the record is repeated for each record, so that its
        gradient has a row for each.

        Raises:
            InnerTransform: the call comes from another transform inside the map.
        """
        if _len_torch_dispatch_stack() > 0:
            raise CannotBeMapped(_DISPATCH)
        level, outside = self._level, list[Tensor]()
        is_inner = level is None or functorch.maybe_current_level() != level
        for t in tensors:
            inside = get_unwrapped(t) if is_batchedtensor(t) else t
            if is_inner or is_gradtrackingtensor(t) or is_batchedtensor(inside):
                raise InnerTransform("whole batches are needed inside a torch.func transform")
            if inside is t:
                _require_public(t)
                outside.append(t.expand(self.records, *t.shape))
            else:
                self.require(t)
                if dim := functorch.maybe_get_bdim(t):
                    with torch._C.DisableTorchFunction():  # these rows are below the map
                        inside = inside.movedim(dim, 0)
                outside.append(inside)
        assert level is not None
        stack = functorch.pop_dynamic_layer_stack()
        try:
            with torch._C.DisableTorchFunction():
                result = of_those_that_run(run, outside)
        except Exception as error:
            self._error = error
            raise
        finally:
            functorch.push_dynamic_layer_stack(stack)
        if isinstance(result, Tensor):
            return self._put_inside(result)
        return map_tensors(result, self._put_inside)

    def _put_inside(self, rows: Tensor) -> Tensor:
        """One record's slice of ``rows``, inside the map."""
        assert self._level is not None
        t: Tensor = functorch._add_batch_dim(rows, 0, self._level)
        self._known[id(t)] = weakref.ref(t)
        return t

    def _own(self, made: Tensor) -> Tensor:
        """Separate memory for each record: a model may write into it."""
        if self._level is None or is_of_records(made):
            return made
        rows = unwrapped(made.new_empty(self.records, *made.shape).copy_(made))
        own = functorch._add_batch_dim(rows, 0, self._level)
        return own.clone() if is_gradtrackingtensor(made) else own  # a clone may be written to

    def _of_all(self, drawn: Tensor) -> Tensor:
        """A single random number for all records: that of the first. No record has another use for
        it, so adding a record changes nothing for the others. It would if it could move them to
        another rank or part of the batch, which has another number.
        """
        is_single = is_batchedtensor(drawn) and drawn.dim() < 2 and drawn.numel() == 1
        if not is_single or self._is_part or functorch.maybe_current_level() != self._level:
            return drawn
        shape = drawn.shape
        with torch._C.DisableTorchFunction():
            return get_unwrapped(drawn).flatten()[0].clone().view(shape)

    def _of_those_that_run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a function that fails for some records, for example for one record's index.
        The program continues once for all records, so nothing in it shows which records failed.
        """
        values, spec = tree_flatten((args, kwargs))
        places = [k for k, v in enumerate(values) if isinstance(v, Tensor) and is_batchedtensor(v)]
        if not places or is_in_place(name_of(func), kwargs):
            return None

        def one(*slices: Tensor) -> Any:
            given = dict(enumerate(values)) | dict(zip(places, slices, strict=True))
            args, kwargs = tree_unflatten(list(given.values()), spec)
            found = FUNCTIONS[func](*args, **kwargs) if func in FUNCTIONS else None
            return func(*args, **kwargs) if found is None else found

        with suppress(Exception):
            run = torch.func.vmap(one, randomness="different")
            return self.known(self.call_batched(run, [values[k] for k in places]), ())
        return None

    def _special(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a function that needs more than vmap; None for all others."""
        first: Any = args[0] if args else None
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is F.multi_head_attention_forward:  # the mode does not see its fused attention
            return _with_plain_attention(func, args, kwargs)
        if func in _EMPTY:  # uninitialised memory may contain other records
            return self._own(func(*args, **kwargs).zero_())
        if self._is_second_way and func in _MADE:
            put = self._of_all if func in _DRAWN else self._own
            return put(func(*args, **kwargs))
        # gradient checkpointing reads it; gradients are computed anyway
        if func == _REQUIRE_GRAD and not is_gradtrackingtensor(first):
            return False
        if func == _REQUIRES_GRAD and is_batchedtensor(first):
            return get_unwrapped(first).requires_grad  # so that its hook is refused, not ignored
        if func is Tensor.requires_grad_ and is_batchedtensor(first):
            return first
        if func is Tensor.__repr__ and is_of_records(first):
            return f"tensor(of one record, size={tuple(first.shape)}, dtype={first.dtype})"
        if func not in FUNCTIONS:
            return None
        found = FUNCTIONS[func](*args, **kwargs)
        return self._own(found) if func is Tensor.new else found

    def _attention(
        self, query: Any, key: Any, value: Any, attn_mask: Any = None, *rest: Any, **kw: Any
    ) -> Tensor:
        """Fused attention does not have a batching rule on every device. It runs on the whole batch
        if each operand has one row of (heads, positions, width). In memory, positions of the result
        come before heads: kernels write them so, and models read them so.
        """
        function, operands = F.scaled_dot_product_attention, [query, key, value]
        if attn_mask is not None:
            mask = attn_mask[(None,) * (4 - attn_mask.dim())]
            operands.append(self.known(mask, (attn_mask,)))

        def run(*tensors: Tensor) -> Tensor:
            q, k, v, *mask = (t.squeeze(1) for t in tensors)
            found = function(q, k, v, *(mask or (None,)), *rest, **kw)
            return found.transpose(1, 2).unsqueeze(1)

        if all(t.dim() == 4 and t.shape[0] == 1 for t in operands):
            with suppress(InnerTransform):
                return self.known(self.call_batched(run, operands), ()).transpose(1, 2)
        found = _with_plain_attention(function, (query, key, value, attn_mask, *rest), kw)
        return self.known(found, ())


class as_traced:
    """Set torch's state to that of a traced program. Hooks on saved tensors are then not called:
    they would see all records, and could mix them. So ``checkpoint`` runs its function once.
    ``transformers`` builds every attention mask, and does not decide by values of tokens, which
    differ between records. ``torch.distributions`` does not check values: those of an invalid
    record are not finite, and count as zero.
    """

    def __enter__(self) -> None:
        with _lock:
            _flags.append((_compiler._is_compiling_flag, Distribution._validate_args))
            _compiler._is_compiling_flag, Distribution._validate_args = True, False
        self._is_tracing = _trace_hooks(True)

    def __exit__(self, kind: Any, *_: Any) -> None:
        is_traced = _trace_hooks(self._is_tracing)
        with _lock:
            before = _flags.pop()
            if not _flags:  # the last map of all threads; the others must leave the flag set
                _compiler._is_compiling_flag, Distribution._validate_args = before
        if kind is None and not is_traced:  # torch.compiler.reset() was called
            raise CannotBeMapped("it resets torch's compiler: remove this from forward")


def is_of_records(t: Any) -> bool:
    """Whether a tensor has one value for each record; inner transforms may wrap it."""
    while isinstance(t, Tensor) and is_gradtrackingtensor(t):
        t = get_unwrapped(t)
    return isinstance(t, Tensor) and is_batchedtensor(t)


# -- torch functions inside a map -----------------------------------------------------------------

_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_REQUIRE_GRAD = Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_READS = LOOKS | {Tensor.grad_fn.__get__}  # type: ignore[union-attr]
_LAYOUTS = (torch.channels_last, torch.channels_last_3d)
# addbmm_ resizes if the sum is larger
_RESIZES = frozenset((Tensor.resize_, Tensor.resize_as_, torch.resize_as_, Tensor.addbmm_))
_INDEX_FILLS = frozenset((Tensor.index_fill, Tensor.index_fill_, torch.index_fill))
# what torch.Tensor(2) and torch.Tensor([1.0]) call where make_fx records, and associative_scan
# torch.profiler.record_function calls the last two
_aten: Any = torch.ops.aten
_profiler: Any = torch.ops.profiler
_LIKE_FUNCTIONS = (
    *(_aten.empty.memory_format, _aten.lift_fresh_copy.default, _aten.slice),
    *(_profiler._record_function_enter_new, _profiler._record_function_exit._RecordFunction),
)
_EMPTY = {torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted}
_EMPTY |= {Tensor.new_empty, Tensor.new_empty_strided, _LIKE_FUNCTIONS[0]}
# what the second way makes in another way; the arguments of what is drawn hold no record's values
_DRAWN = frozenset((torch.rand, torch.randn, torch.randint))
_MADE = {torch.zeros, torch.ones, torch.full, torch.eye, *_DRAWN}
_MADE |= {Tensor.new_zeros, Tensor.new_ones, Tensor.new_full}
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_OPERATOR = {id(torch._ops.OperatorBase), id(torch._ops.OpOverloadPacket)}
# by identity: a metaclass may compare or hash
_WITHOUT_CODE = set(map(id, (int, float, bool, str, type(None), torch.dtype, torch.device)))
_WITHOUT_CODE.add(id(torch.ScriptObject))
_CLASS_OF_FUNCTIONS = type(torch.autograd.Function)
_name_of: Any = type.__dict__["__name__"].__get__  # a metaclass may compute it
_OF_ALL_RECORDS = (
    *(torch._is_any_true, torch._ctc_loss, torch.linalg.ldl_solve),
    *(torch._euclidean_dist, torch._weight_norm_interface, torch.batch_norm_update_stats),
    *(torch.batch_norm_gather_stats, torch.batch_norm_gather_stats_with_counts),
    *(torch.cudnn_batch_norm, torch.miopen_batch_norm),
    # beyond the memory of a record
    *(torch._compute_linear_combination, torch._nested_compute_contiguous_strides_offsets),
    *(torch._convert_indices_from_coo_to_csr, torch._convert_indices_from_csr_to_coo),
)
# The fewest dimensions of a record's arguments: below, vmap makes a table of all records.
_DIMENSIONS = {torch.searchsorted: 1, torch.linalg.householder_product: 2}
_DIMENSIONS |= {torch.orgqr: 2, Tensor.orgqr: 2}
# Functions whose arguments or results need a check.
_LOOKED_AT = frozenset((_REQUIRES_GRAD, _REQUIRE_GRAD, Tensor.requires_grad_, Tensor.__repr__))
_LOOKED_AT |= {F.scaled_dot_product_attention, F.multi_head_attention_forward}
_LOOKED_AT |= {torch.segment_reduce, *_OF_ALL_RECORDS, *_DIMENSIONS}
_LOOKED_AT |= _RESIZES | _INDEX_FILLS | _EMPTY | _MADE | FUNCTIONS.keys() | _READS


@functools.lru_cache(4096)
def _is_harmless(func: Any) -> bool:
    """Whether ``func`` is torch's, and vmap keeps records apart in it for all arguments."""
    return func not in _LOOKED_AT and is_torchs(func)


class RecordsApart(TorchFunctionMode):
    """For a plain ``torch.func.vmap`` over records: functions that would see several records are
    refused, or replaced by operations that do not.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_harmless(func) or "generator" in kwargs:
            _require_nothing_hidden(func, args, kwargs)
        found = FUNCTIONS[func](*args, **kwargs) if func in FUNCTIONS else None
        return func(*args, **kwargs) if found is None else found


def _require_nothing_hidden(func: Any, args: Any, kwargs: Any) -> None:
    """Refuse functions that run below the map, where tensors hold all records, or unseen."""
    name = name_of(func)
    if kwargs.get("generator") is not None:
        raise CannotBeMapped(
            "it draws from its own generator, which gives each record different numbers: draw"
            " fixed numbers in __init__, into a buffer"
        )
    if func in _RESIZES:
        raise CannotBeMapped(f"{name} resizes a tensor in memory: make a new one, as with F.pad")
    if func in _INDEX_FILLS and any(map(is_of_records, (*args[2:], *kwargs.values()))):
        raise CannotBeMapped(
            f"{name} with an index or a value from a record would write into other records: write"
            " torch.where(torch.arange(n) == index, value, x)"
        )
    if isinstance(func, _OPERATORS) and func not in _LIKE_FUNCTIONS:
        raise CannotBeMapped(f"it calls operator {func}: write torch's function, or leave it out")
    if not (is_torchs(func) or isinstance(func, (torch._ops.OperatorBase, *_OPERATORS))):
        raise CannotBeMapped(f"{name} is not a function of torch: it may mix records")
    table = args[0] if args else kwargs.get("sorted_sequence", kwargs.get("input"))
    if func in _OF_ALL_RECORDS or (func in _DIMENSIONS and table.dim() < _DIMENSIONS[func]):
        raise CannotBeMapped(
            f"{name} reads several records at once: write t.any(), F.ctc_loss,"
            " torch.linalg.solve or a < b instead"
        )
    if func is F.embedding and kwargs.get("max_norm") is not None:
        raise CannotBeMapped("max_norm changes its table in place, in every pass: leave it out")
    if func is torch.segment_reduce and {"unsafe", "offsets"} & kwargs.keys():  # without a check
        raise CannotBeMapped("segment_reduce may read other records: pass data, reduce, lengths=")
    if func in _READS and is_of_records(args[0]):
        raise CannotBeMapped(
            f"it reads a number or node of records ({name}): compute with tensors, and the loss by"
            " loss="
        )
    # a custom function, or one inside it, may define its own rule for whole batches
    own: Any = args[0] if args and isinstance(func, torch._ops.HigherOrderOperator) else None
    is_function = isinstance(own, type) and issubclass(own, torch.autograd.Function)
    if is_function and not (
        own.__module__.startswith("torch.")
        and getattr(sys.modules.get(own.__module__), own.__name__, None) is own
    ):
        raise CannotBeMapped(f"{own.__name__} is a custom autograd.Function: it may mix records")


def _with_plain_attention(func: Any, args: Any, kwargs: Any) -> Any:
    with sdpa_kernel(SDPBackend.MATH):
        return func(*args, **kwargs)


def require_no_modes() -> None:
    """Refuse modes of the caller: they see tensors that hold all records. Refuse its transforms: a
    tensor that a map left could have the level of another map's transforms.
    """
    if functorch.maybe_current_level() is not None:
        raise CannotBeMapped(
            "it runs inside a transform of the caller (torch.func.vmap, grad): call it outside, or"
            " write the transform in the model"
        )
    if not (_len_torch_dispatch_stack() or _len_torch_function_stack()):
        return
    names = {type(mode).__module__.partition(".")[0] for mode in _get_current_function_mode_stack()}
    if _len_torch_dispatch_stack() > 0 or not names <= {"torch", "torch_dpbayes"}:
        raise CannotBeMapped(
            "it runs under a TorchFunctionMode or TorchDispatchMode, which may see all records:"
            " leave this mode before you call the model"
        )


def _require_public(outside: Tensor) -> None:
    """Refuse a tensor of the data set, or one computed from other or several records."""
    if is_private(outside):
        raise CannotBeMapped("it uses the data set or several records: compute it from each")


def _outside(func: Any, values: Iterable[Any], own: OfOneMap) -> list[Tensor]:
    """Tensors among arguments, also in tuples and lists, that take no part in the map.

    Refuses arguments that would run the caller's code below the map, or unseen by it: functions,
    and objects of classes written in Python, also of subclasses of numbers, texts and lists.
    """
    found: list[Tensor] = []
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is nn.Parameter:
            if is_batchedtensor(value) or is_gradtrackingtensor(value):
                own.require(value)
            else:
                _require_public(value)
                found.append(value)
        elif id(kind) in _WITHOUT_CODE or value is Tensor or value is nn.Parameter:
            continue
        elif kind is slice:
            found += _outside(func, (value.start, value.stop, value.step), own)
        elif kind is list or (not flags_of(kind) & IN_PYTHON and issubclass(kind, tuple)):
            found += _outside(func, value, own)
        elif kind is _CLASS_OF_FUNCTIONS and flags_of(type(func)) & IN_PYTHON:
            continue  # _require_nothing_hidden looks at it
        elif flags_of(kind) & IN_PYTHON or (
            flags_of(value) & IN_PYTHON if isinstance(value, type) else callable(value)
        ):
            if kind is Derived or kind is Followed:
                _require_public(value)
            raise CannotBeMapped(
                f"it passes a {_name_of(kind)} to {name_of(func)}, and the library cannot see what"
                " its code does: pass plain tensors, numbers and lists, and call functions yourself"
            )
    return found
