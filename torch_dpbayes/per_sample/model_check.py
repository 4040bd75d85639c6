"""Checks of a model in make_private: layers without per-sample gradients, and one comparison of
gradients.

Privacy does not rest on the comparison: a model that runs for each record alone cannot mix records.
The comparison finds errors of book-keeping, and models whose result for one record differs from
their result for a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from ..errors import DPBayesError, ModelError
from .bookkeeping import BookkeepingGradientSource, UsedElsewhere, numbers_outside
from .derived import is_private
from .followed import shape_of
from .mapped_forward import BATCH_NORM_TO_EVAL, uncompiled
from .nested import Keywords, Nested, map_tensors, output_of, rows_of, synthetic
from .operations import Delivery
from .record_map import CannotBeMapped, OutsideTensor, as_traced, in_plain_words, is_of_records

_INSTEAD = (
    "Or vouch for its independence: make_private(..., assume_independent_records=True,"
    ' grad_sample_mode="hooks")'
)
_WITHOUT_MAP = "Without make_private it fails, too: check shapes and types"
_RECORDS = 2
_TRIES = 3  # with fresh synthetic records: rounding may switch a ReLU
# Relative to the gradient of a record. Errors of book-keeping are large; rounding is not.
_ROOM = 0.02


def check_layers(module: nn.Module) -> None:
    """Raise if the model is in eval mode, or if a layer cannot have per-sample gradients."""
    if not module.training:
        raise ModelError(
            "the model is in eval mode, so no per-sample gradients are recorded: call"
            f" model.train() first. To keep frozen BatchNorm in eval mode: {BATCH_NORM_TO_EVAL}",
            code="model-eval",
        )
    for name, p in module.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ModelError(
                f"parameter {name!r} has no shape yet: run the lazy model once on a synthetic"
                " batch, model(torch.zeros(...)), before make_private",
                code="model-lazy",
            )
    for name, t in (*module.named_parameters(), *module.named_buffers()):
        if is_private(t):
            raise ModelError(
                f"{name!r} of the model shares memory with the private data set, so each record"
                " would see all others: leave it out, or use a clone() of public records",
                code="data-private",
            )
        if t.layout != torch.strided:
            raise ModelError(
                f"{name!r} of the model has layout {t.layout}, whose parts the library cannot"
                " compare between steps: use a dense tensor, t.to_dense()",
                code="model-layer",
            )
    for name, layer in module.named_modules():
        # torch's own classes only: the map checks what a subclass does
        is_norm = isinstance(layer, _BatchNorm) and type(layer).__module__.startswith("torch.nn.")
        if isinstance(layer, torch.jit.ScriptModule):
            reason = "is compiled by TorchScript, so it cannot be inspected: use the module itself"
        elif is_norm and (layer.training or not layer.track_running_stats):
            reason = (
                "mixes records: use torch.nn.LayerNorm, or GroupNorm by model ="
                " opacus.validators.ModuleValidator.fix(model). To keep pretrained statistics:"
                f" {BATCH_NORM_TO_EVAL}"
            )
        else:
            continue
        raise ModelError(
            f"module {name or type(module).__name__!r}, {type(layer).__name__}, {reason}",
            code="model-layer",
        )


_DRAWS = frozenset("rand randn randint rand_like randn_like randint_like bernoulli".split())
_DRAWS_IN_PLACE = frozenset("bernoulli_ normal_ uniform_ exponential_".split())
_NORMS = frozenset(("batch_norm", "instance_norm"))
# the position of the dropout probability among the arguments
_DROPOUT_AT = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}


class _WithoutRandomness(TorchFunctionMode):
    """Replaces random numbers by constants, and switches dropout off."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        if name in _DRAWS_IN_PLACE:
            return args[0].fill_(0.5)
        place = _DROPOUT_AT.get(func, len(args))
        if "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        elif place < len(args):
            args = (*args[:place], 0.0, *args[place + 1 :])
        state = torch.get_rng_state() if name in _DRAWS else None
        found = func(*args, **kwargs)
        if state is not None:
            torch.set_rng_state(state)
        if name in _NORMS and found.requires_grad and not is_of_records(found):
            # torch computes a wrong gradient for a batch of one whose output is transposed
            found.register_hook(lambda g: g.clone(memory_format=torch.contiguous_format))
        if name in _DRAWS and isinstance(found, Tensor):
            return found.detach().fill_(0.5 if found.is_floating_point() else 0)
        return found


def check_model(
    module: nn.Module, source: BookkeepingGradientSource, ways: Sequence[tuple[Any, ...]]
) -> None:
    """Check the model now if it runs with arguments of one of these shapes, else at its first pass,
    when the shapes are known.

    Mapped outputs and gradients of a few synthetic records are compared with those of the same
    records alone. The model is not changed.
    """

    def at_first_pass(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = (*args, Keywords(kwargs)) if kwargs else args
        with _left_as_found(module):
            _Comparison(module, source, tuple(map_tensors(arguments, shape_of))).run()

    generator = torch.Generator().manual_seed(0)
    with _left_as_found(module):
        for way in ways:
            try:
                with torch.no_grad(), source.paused(), uncompiled(module):
                    output_of(module, synthetic(way, _RECORDS, generator))
            except Exception:  # the model needs its inputs in another way
                continue
            _Comparison(module, source, way).run()
            return
    source.mapped.pending = at_first_pass


@contextmanager
def _left_as_found(module: nn.Module) -> Iterator[None]:
    """Restore the caller's generators, gradients, parameters and buffers at the end."""
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    grads = [(p, p.grad) for p in module.parameters()]
    values = [(t, t.detach().clone()) for t in (*module.parameters(), *module.buffers())]
    for p, _ in grads:
        p.grad = None
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        for p, grad in grads:
            p.grad = grad
        for t, before in values:
            if not torch.equal(t, before):
                t.data.copy_(before)


class _Run(NamedTuple):
    """Outputs for some synthetic records, and gradients of a linear loss of these outputs."""

    outputs: Sequence[Tensor]
    gradients: Sequence[Tensor | None]


class _Comparison:
    """Compares synthetic records of the arguments' shapes in the map with each record alone."""

    def __init__(
        self, module: nn.Module, source: BookkeepingGradientSource, arguments: tuple[Any, ...]
    ) -> None:
        self.module, self.source, self.arguments = module, source, arguments
        self.named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in self.named]
        self.fails_alone = False

    def run(self) -> None:
        """Compare, and move parameters that are used outside of their layers into the map. If the
        map fails, it is tried in its second way.
        """
        self.source.mapped.is_checking = True
        try:
            self._require_equal()
        except UsedElsewhere as found:
            if self.source.take_into_map(found.parameters):
                self.run()
                return
            outside = set(found.parameters)
            names = [n for n, p in self.module.named_parameters() if p in outside]
            raise ModelError(
                f"parameters {names} get no gradient from the model's forward pass: freeze with"
                " requires_grad_(False) what the model does not use; return beside the output what"
                " only the loss uses",
                code="model-unused",
            ) from None
        except ModelError as error:
            if error.code != "model-map" or self.source.is_second_way:
                raise
            self.source.is_second_way = True
            self.run()
        finally:
            self.source.mapped.is_checking = False

    def _require_equal(self) -> None:
        """Raise if mapped outputs or gradients are not those of the records alone."""
        generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
        for _ in range(_TRIES):
            inputs = synthetic(self.arguments, _RECORDS, generator)
            self.source.mapped.rows_of_scalars = self._rows_of_scalars(inputs)
            mapped, weights = self._mapped(map_tensors(inputs, torch.clone))
            alone = [self._alone(rows_of(inputs, k), weights) for k in range(_RECORDS)]
            found = (self._difference(mapped, k, run) for k, run in enumerate(alone))
            reason = next((text for text in found if text is not None), None)
            if reason is None:
                return
        raise ModelError(
            f"{reason}: the model mixes records, or uses parameters outside of their modules."
            f" Compute what it needs from each record alone. {_INSTEAD}.",
            code="model-mixes",
        )

    def _difference(self, mapped: _Run, k: int, alone: _Run | None) -> str | None:
        """What differs between record k in a batch and this record alone; None if nothing does."""
        # the model has randomness that cannot be switched off, or fails on synthetic records
        if alone is None or not all(bool(t.isfinite().all()) for t in alone.outputs):
            return None
        is_coarse = any(
            p.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(p.device.type)
            for p in self.parameters
        )
        room = 20 * _ROOM if is_coarse else _ROOM
        for mine, theirs in zip(mapped.outputs, alone.outputs, strict=True):
            if len(mine) < _RECORDS:  # a loss of all records, whose user vouches for it
                continue
            if mine[k].shape != theirs.shape and mine[k : k + 1].shape != theirs.shape:
                return f"the output has shape {list(mine[k].shape)} for one record"
            if not _is_close(mine[k].flatten(), theirs.flatten(), float(_norm(theirs)), room):
                return "the output of a record depends on the batch"
        length = math.hypot(*(float(_norm(g)) for g in alone.gradients if g is not None))
        gradients = zip(self.named, mapped.gradients, alone.gradients, strict=True)
        for (name, p), found, true in gradients:
            true = torch.zeros_like(p) if true is None else true.to_dense()
            if found is not None and not _is_close(found[k], true.flatten(), length, room):
                return f"the per-sample gradients of parameter {name!r} are not its gradients"
        return None

    @contextmanager
    def _by_itself(self) -> Iterator[None]:
        with self.source.paused(), uncompiled(self.module), as_traced():
            yield

    def _rows_of_scalars(self, inputs: tuple[Any, ...]) -> tuple[bool, ...]:
        """Which outputs have one number per record, and so no dimension beside the records."""
        with torch.no_grad(), self._by_itself():
            try:
                return tuple(t.dim() == 1 for t in Nested(output_of(self.module, inputs)).tensors)
            except Exception:  # the model cannot run on batches
                self.fails_alone = True
                return ()

    def _mapped(self, inputs: tuple[Any, ...]) -> tuple[_Run, Sequence[Tensor]]:
        """Both records in the map, and the weights of the loss."""
        source = self.source
        source.discard(self.parameters)
        source.mapped.around = _WithoutRandomness()
        try:
            with _blamed(self.module, self.fails_alone), torch.enable_grad():
                given = Delivery(_RECORDS)(inputs, _RECORDS) if source.follows else inputs
                outputs = Nested(output_of(self.module, given)).tensors
                rows = [_rows_of_output(t, source.loss_reduction) for t in outputs]
                floats = [t for t in rows if t.is_floating_point()]
                weights = [torch.randn(t.shape[1:], device=t.device).to(t.dtype) for t in floats]
                total = sum((t * w).float().sum() for t, w in zip(floats, weights, strict=True))
                if not isinstance(total, Tensor) or not total.requires_grad:
                    raise ModelError(
                        "the model's output has no gradient: return a tensor of floating-point"
                        " numbers with a row per record, or a loss, computed from trainable"
                        " parameters",
                        code="model-output",
                    )
                is_mean = not source.follows and source.loss_reduction == "mean"
                (total / _RECORDS if is_mean else total).backward()
            records: dict[Tensor, Tensor] = {}
            for part in source.recorded(self.named):
                records.update(part.per_record())
            if missing := [p for p in self.parameters if p not in records]:
                raise UsedElsewhere("in no gradient", missing)
            gradients = [records[p].reshape(_RECORDS, -1) for p in self.parameters]
            true = torch.stack([_norm(g, 1) for g in gradients]).norm(dim=0)
            norms = source.norms(self.named)
            # norms include what sums may lose by rounding
            wrong = (norms < (1 - _ROOM) * true - 1e-6) | (norms > 1.4 * true + 1e-3)
            if bool((wrong & norms.isfinite()).any()):  # a step replaces the others by zero
                raise ModelError(
                    "the norms of per-sample gradients are wrong. This is a bug of the library:"
                    ' use grad_sample_mode="vmap", and please report the model',
                    code="model-norms",
                )
            return _Run([t.detach() for t in rows], gradients), weights
        finally:
            source.mapped.around = nullcontext()
            source.discard(self.parameters)

    def _alone(self, inputs: tuple[Any, ...], weights: Sequence[Tensor]) -> _Run | None:
        """One record, by ordinary autograd; None if two runs differ, or draw random numbers (which
        may be equal by chance), or if one fails.
        """
        state, others = torch.get_rng_state(), numbers_outside()
        with self._by_itself(), torch.enable_grad(), _WithoutRandomness():
            try:
                # the model may write into them
                runs = (map_tensors(inputs, torch.clone) for _ in range(2))
                first, second = (Nested(output_of(self.module, given)).tensors for given in runs)
            except (RuntimeError, ValueError, IndexError):  # for values that no real record has
                return None
            if not torch.equal(torch.get_rng_state(), state) or numbers_outside() != others:
                return None
            for a, b in zip(first, second, strict=True):
                if a.shape != b.shape or not torch.equal(a.nan_to_num(), b.nan_to_num()):
                    return None
            floats = [t for t in first if t.is_floating_point()]
            each = zip(floats, weights, strict=True)
            total = sum((t.reshape(w.shape) * w).sum().float() for t, w in each)
            gradients: Sequence[Tensor | None] = [None] * len(self.parameters)
            if isinstance(total, Tensor) and total.requires_grad:
                gradients = torch.autograd.grad(total, self.parameters, allow_unused=True)
        return _Run([torch.atleast_1d(t.detach()) for t in first], gradients)


def _norm(t: Tensor, dim: int | None = None) -> Tensor:
    """The norm, in single precision if the input is in half precision."""
    dtype = torch.promote_types(t.dtype, torch.float32)
    return torch.linalg.vector_norm(t.to_dense().to(dtype), dim=dim)


def _is_close(found: Tensor, true: Tensor, length: float, room: float) -> bool:
    distance = float(_norm(found * 1 - true * 1))  # Booleans become numbers
    return not distance > room * (length + 1e-6)  # also true if the distance is NaN


def _rows_of_output(t: Tensor, loss_reduction: str) -> Tensor:
    """The values of an output, with records first; for a loss, one value for each record."""
    rows = getattr(t, "_rows", None)
    if rows is None:
        return t if t.dim() > 0 else (t * _RECORDS if loss_reduction == "mean" else t)[None]
    return rows if t.dim() == 0 else rows.flatten(0, 1).unflatten(0, (_RECORDS, -1))


@contextmanager
def _blamed(module: nn.Module, fails_alone: bool) -> Iterator[None]:
    """Convert an error inside to one that says why the model cannot be mapped, and names the
    innermost module of the error. ``fails_alone``: whether it fails without the map, too.
    """
    running: list[str] = []
    handles = []
    for name, layer in module.named_modules():
        handles += [
            layer.register_forward_pre_hook(lambda *_, name=name: running.append(name)),
            layer.register_forward_hook(lambda *_: running.__delitem__(-1)),
        ]
    own = set(module.parameters())
    try:
        yield
    except OutsideTensor as error:
        outside = error.tensor if error.tensor in own else error.tensor._base  # weight.T
        if outside is None or outside not in own:
            raise
        raise UsedElsewhere(str(error), [outside]) from error
    except Exception as error:
        if isinstance(error, DPBayesError) and type(error) is not CannotBeMapped:
            raise
        name = (running[-1] if running else "") or type(module).__name__
        reason = in_plain_words(error).rstrip(".")
        is_torchs = not isinstance(error, DPBayesError) and reason in str(error)
        raise ModelError(
            f"module {name!r} cannot run for one record at a time: {reason}."
            f" {_WITHOUT_MAP if fails_alone and is_torchs else _INSTEAD}.",
            code="model-map",
        ) from error
    finally:
        for handle in handles:
            handle.remove()
