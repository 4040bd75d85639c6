"""Does a model treat every record by itself? Found out on two made-up records; no data is touched.

A clip bound limits what one record does to *its own* gradient. It says nothing where another record's gradient depends on it as well, or where
per-record gradients miss a part of the real one. Both are tested here by running the model, not by its list of layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .clipping.gradient_source import GradientSource, _tensors

_FIX = (
    "Replace it by a layer that treats each record by itself: opacus.validators.ModuleValidator.fix(model) turns BatchNorm into GroupNorm and "
    "untracks InstanceNorm."
)
_ATTENTION = (
    "Take opacus.layers.DPMultiheadAttention, or write attention with nn.Linear layers for queries, keys and values and "
    "torch.nn.functional.scaled_dot_product_attention."
)


def fixed_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Copies of the model's buffers and frozen parameters, which training must leave as they are."""
    for name, b in module.named_buffers():
        yield name, b.detach().clone()
    for name, p in module.named_parameters():
        if not p.requires_grad:
            yield name, p.detach().clone()


def made_up_inputs(batch: Any) -> tuple[Any, ...]:
    """Arguments for two made-up records, with the shapes and types of ``batch`` and none of its values.

    A tuple or list is taken as the model's inputs followed by the target; anything else as the one input.
    """
    inputs = (batch[:-1] if len(batch) > 1 else batch) if isinstance(batch, (tuple, list)) else (batch,)
    return tuple(_map(lambda t: _rows_like(t, 2), inputs))


def check_layers(module: nn.Module) -> None:
    """Raise where the kind of a layer, or eval mode, already rules out per-record gradients.

    Args:
        module: the model, before any hooks are attached.

    Raises:
        ValueError: with the layer's name and the remedy.
    """
    if not module.training:
        raise ValueError("the model is in eval mode, in which no per-record gradients are recorded: call model.train() first")
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None:
            raise ValueError(
                f"module {name!r} renormalises rows of its weight in the forward pass (max_norm), which tells without noise which ones the batch "
                "uses. Leave out max_norm."
            )
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.scale_grad_by_freq:
            raise ValueError(
                f"module {name!r} divides gradients by how often a token occurs in the batch (scale_grad_by_freq), which depends on the other "
                "records. Leave it out."
            )
        validate = ModuleValidator.VALIDATORS.get(type(layer))
        errors = validate(layer) if validate is not None and any(p.requires_grad for p in layer.parameters()) else []
        if errors:
            fix = _ATTENTION if isinstance(layer, nn.MultiheadAttention) else _FIX
            raise ValueError(f"module {name or type(module).__name__!r} cannot be trained privately: {errors[0]} {fix}")


def check_model(module: nn.Module, source: GradientSource, inputs: tuple[Any, ...]) -> None:
    """Raise unless per-record gradients of ``module`` are what clipping takes them for.

    Args:
        module: the model, with ``source``'s hooks attached. It is left as it was found, buffers and ``p.grad`` included.
        source: its gradient source.
        inputs: positional arguments of ``module`` for two records, records in dimension 0.

    Raises:
        ValueError: a record's output depends on another record or on their number, per-record gradients are not the gradients of the
            records, a buffer changed, or the forward pass cannot take an empty batch. The message names the module and the remedy.
    """
    with _left_as_found(module), torch.random.fork_rng(devices=_cuda_devices(module)):
        _check_independence(module, source, inputs)
        _check_gradients(module, source, inputs)
        # a model that sorts its records inside leaves them alone in one of the two orders
        _check_gradients(module, source, tuple(_map(lambda t: t.flip(0), inputs)))
        _check_empty_batch(module, source, inputs)


# -- the three questions -----------------------------------------------------------------------------------------------------------


def _check_independence(module: nn.Module, source: GradientSource, inputs: tuple[Any, ...]) -> None:
    before = {name: t.detach().clone() for name, t in [*module.named_buffers(), *module.named_parameters()]}
    other = tuple(_map(lambda t: torch.cat([t[:1], _rows_like(t, 1, shift=3.0)]), inputs))
    alone = tuple(_map(lambda t: t[:1], inputs))
    with source.paused():
        try:
            first = _trace(module, inputs)
        except Exception as error:
            shapes = [list(t.shape) for t in _tensors(inputs)]
            raise ValueError(
                f"the model cannot be run on two made-up records of shapes {shapes}: {error}. Pass example_inputs=, the positional arguments of the "
                "model for two made-up records (no real ones)."
            ) from error
        second = _trace(module, other)
        _require_same_rows(module, first, second, "another record in the batch")
        try:
            third = _trace(module, alone)
        except Exception as error:
            raise ValueError(f"the model fails on a batch of one record, which Poisson sampling delivers: {error}. {_FIX}") from error
        _require_same_rows(module, first, third, "the number of records in the batch")
    for name, t in [*module.named_buffers(), *module.named_parameters()]:
        if name not in before or not torch.equal(t, before[name]):
            owner = name.rpartition(".")[0] or type(module).__name__
            raise ValueError(
                f"module {owner!r} changes its buffer or parameter {name!r} in the forward pass: statistics of the records would leave without "
                f"noise. {_FIX}"
            )


def _check_gradients(module: nn.Module, source: GradientSource, inputs: tuple[Any, ...]) -> None:
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]
    weights: list[Tensor] = []

    def loss_per_record(arguments: tuple[Any, ...]) -> Tensor:
        with _SameRandomNumbers():
            outputs = [t.float().reshape(len(t), -1) for t in _tensors(module(*arguments)) if t.is_floating_point()]
        if not weights:
            generator = torch.Generator().manual_seed(1)
            weights.extend(torch.randn(t.shape, generator=generator).to(t.device) for t in outputs)
        return torch.stack([(t * w).sum(1) for t, w in zip(outputs, weights, strict=True)]).sum(0)

    def gradients(loss: Tensor) -> tuple[Tensor | None, ...]:
        if not loss.requires_grad:
            return (None,) * len(parameters)
        found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
        return tuple(g.to_dense() if g is not None and g.is_sparse else g for g in found)

    source.discard(parameters)
    try:
        losses = loss_per_record(inputs)
        (losses.sum() if source.loss_reduction == "sum" else losses.mean()).backward()
    except Exception as error:
        raise ValueError(
            f"per-record gradients of this model cannot be computed: {error}. Where this comes from a parameter that stands beside other layers (a "
            "position or class token), give it a small module of its own; otherwise replace the layer."
        ) from error
    recorded = [source.per_record_gradients(p) for p in parameters]
    with source.paused():
        losses = loss_per_record(inputs)
        truth = [gradients(losses[i]) for i in range(2)]
    largest = max((float(g.norm()) for t in truth for g in t if g is not None), default=0.0)
    for k, ((name, p), records) in enumerate(zip(named, recorded, strict=True)):
        true = torch.stack([torch.zeros_like(p) if g is None else g for g in (t[k] for t in truth)])
        if records is None:
            if truth[0][k] is None and truth[1][k] is None:
                raise ValueError(
                    f"parameter {name!r} is not used by the forward pass: it would be given noise only. Use it, or freeze it with "
                    "requires_grad_(False)."
                )
            raise ValueError(_wrong_gradient(name, "got no per-record gradient"))
        if records.shape[1:] == true.shape[1:] and len(records) != len(true):
            raise ValueError(
                f"parameter {name!r} got {len(records)} per-record gradients for two records: its module sees another first dimension. Keep records "
                "in dimension 0 of every layer's input (for positions, .expand(len(x), -1))."
            )
        if records.shape != true.shape:
            raise ValueError(_wrong_gradient(name, f"got per-record gradients of shape {tuple(records.shape)}, expected {tuple(true.shape)}"))
        tolerance = 1e-2 if p.dtype in (torch.float16, torch.bfloat16) else 1e-3
        scale = max(float(true.norm()), 1e-3 * largest)  # a gradient that cancels is rounding error
        if not float((records - true).norm()) <= tolerance * scale:
            raise ValueError(_wrong_gradient(name, "got per-record gradients that are not the gradients of the records"))
    _check_clipping(named, source, [[torch.zeros_like(p) if g is None else g for p, g in zip(parameters, t, strict=True)] for t in truth])
    source.discard(parameters)


def _check_clipping(named: Sequence[tuple[str, Tensor]], source: GradientSource, truth: list[list[Tensor]]) -> None:
    """Norms and the clipped sum, which a source may compute in other ways than per-record gradients, against the true ones."""
    flat = torch.stack([torch.cat([g.detach().double().flatten() for g in t]) for t in truth])
    norms = flat.norm(dim=1)
    clip = max(float(norms.max()) / 2, 1e-12)
    dtype = torch.float64 if any(p.dtype == torch.float64 for _, p in named) else torch.float32
    out = [torch.zeros(p.numel(), dtype=dtype, device=p.device) for _, p in named]
    for _, p in named:
        p.grad = None  # hooks leave an ordinary gradient, and an unhooked use was found above
    found = source.norms(named).double()
    source.add_clipped_sum(named, clip, out)
    expected = (flat * (clip / norms).clamp(max=1.0)[:, None]).sum(0)
    tolerance = 2e-2 if any(p.dtype in (torch.float16, torch.bfloat16) for _, p in named) else 2e-3
    are_norms = float((found - norms).norm()) <= tolerance * float(norms.norm())
    if not are_norms or not float((torch.cat(out).double() - expected).norm()) <= tolerance * clip:
        raise ValueError("the clipped sum of two made-up records is not that of their gradients; please report the model as a bug")


def _check_empty_batch(module: nn.Module, source: GradientSource, inputs: tuple[Any, ...]) -> None:
    empty = tuple(_map(lambda t: t[:0], inputs))
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]

    def run() -> None:
        try:
            outputs = [t for t in _tensors(module(*empty)) if t.requires_grad]
            torch.stack([t.float().sum() for t in outputs]).sum().backward()
            if any(source.per_record_gradients(p) is None for p in parameters):
                raise ValueError("it leaves parameters without gradients; no shortcut for empty inputs may leave the forward pass early")
            if len(source.norms(named)) > 0:
                raise ValueError("it comes out as a record")
        finally:
            source.discard(parameters)
            for p in parameters:
                p.grad = None

    try:
        run()
    except Exception:
        source.use_stand_in()
        try:
            run()
        except Exception as error:
            raise ValueError(
                f"the model cannot take an empty batch, which Poisson sampling delivers now and then and which must get its noise too: {error}. "
                "A record of ones in its place does not pass either. Write x.flatten(1) instead of x.view(len(x), -1), and replace layers that "
                "fail on zero rows."
            ) from error


# -- running and comparing ---------------------------------------------------------------------------------------------------------


def _trace(module: nn.Module, arguments: tuple[Any, ...]) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    """Run and note (module, inputs, outputs) in the order in which modules finish; the model itself comes last."""
    calls: list[tuple[str, list[Tensor], list[Tensor]]] = []
    handles = [
        layer.register_forward_hook(
            lambda _, given, output, name=name: calls.append((name, _detached(given), _detached(output)))
        )
        for name, layer in module.named_modules()
    ]
    try:
        with torch.no_grad(), _SameRandomNumbers():
            module(*arguments)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _require_same_rows(
    module: nn.Module,
    first: list[tuple[str, list[Tensor], list[Tensor]]],
    second: list[tuple[str, list[Tensor], list[Tensor]]],
    on_what: str,
) -> None:
    final = first[-1][2]
    if not final or any(t.dim() == 0 or len(t) != 2 for t in final):
        raise ValueError(
            "the model's output must be a tensor with one row per record in dimension 0 (a loss computed inside the model mixes records)"
        )
    if not all(bool(torch.isfinite(t).all()) for t in [*final, *second[-1][2]] if t.is_floating_point()):
        raise ValueError("the model's output on made-up records is not finite: pass example_inputs=, made-up records that the model can take")
    if _same_first_row(final, second[-1][2]):
        return
    where = f"the forward pass of {type(module).__name__!r}"
    for (name, given, output), (_, other_given, other_output) in zip(first, second, strict=False):  # the runs may take different paths
        if not _same_first_row(given, other_given):
            parent = name.rpartition(".")[0]
            where = f"the forward pass of {parent or type(module).__name__!r}, before module {name!r},"
            break
        if not _same_first_row(output, other_output):
            where = f"module {name!r}" if name else where
            break
    raise ValueError(
        f"{where} makes a record's output depend on {on_what}: clipping each record's gradient does not bound what one record does. {_FIX}"
    )


def _same_first_row(a: list[Tensor], b: list[Tensor]) -> bool:
    if len(a) != len(b):
        return False
    for s, t in zip(a, b, strict=True):
        if s.dim() == 0 or t.dim() == 0 or len(s) == 0 or len(t) == 0:
            continue
        s, t = s[0].double(), t[0].double()
        if s.shape != t.shape or not torch.allclose(s, t, rtol=1e-3, atol=1e-5 + 1e-4 * float(s.abs().max() if s.numel() else 0)):
            return False
    return True


def _wrong_gradient(name: str, what: str) -> str:
    return (
        f"parameter {name!r} {what}: clipping would miss a part of what a record contributes. Use every parameter through the forward pass "
        "of the module that owns it, not through torch.nn.functional, and change nothing in place."
    )


@contextmanager
def _left_as_found(module: nn.Module) -> Iterator[None]:
    tensors = [*module.named_buffers(), *module.named_parameters()]
    before = {name: t.detach().clone() for name, t in tensors}
    grads = [(p, p.grad) for p in module.parameters()]
    try:
        with torch.no_grad():
            for p, _ in grads:
                p.grad = None
                if p.is_floating_point():  # layers that start at zero would hide what lies behind them
                    p.add_(_rows_like(p, len(p)) * (0.5 / math.sqrt(p[0].numel())) if p.dim() > 1 else 0.1 * _rows_like(p[None], 1)[0])
        yield
    finally:
        for p, grad in grads:
            p.grad = grad
        with torch.no_grad():
            for name, t in tensors:
                t.copy_(before[name])


def _rows_like(t: Tensor, rows: int, shift: float = 0.0) -> Tensor:
    """Made-up rows: Gaussian numbers, or zeros and ones where integers may be indices."""
    generator = torch.Generator().manual_seed(17 + int(shift))
    shape = (rows, *t.shape[1:])
    if t.is_floating_point():
        return (torch.randn(shape, generator=generator) * (1 + shift) + shift).to(t.dtype).to(t.device)
    return torch.randint(0, 2, shape, generator=generator).to(t.dtype).to(t.device)


def _map(function: Any, value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {k: _map(function, v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        mapped = [_map(function, v) for v in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    return value


class _SameRandomNumbers(TorchDispatchMode):
    """Every operation that draws random numbers starts from the same state: row 1 of a dropout mask is then the same in any batch."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in function.tags:
            torch.manual_seed(0)
        return function(*args, **(kwargs or {}))


def _detached(value: Any) -> list[Tensor]:
    return [t.detach().clone() for t in _tensors(value)]


def _cuda_devices(module: nn.Module) -> list[torch.device]:
    return list({p.device for p in module.parameters() if p.device.type == "cuda"})
