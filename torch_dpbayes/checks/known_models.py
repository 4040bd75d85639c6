"""Models that were checked in this process, for which the check is not run again.

What a check found out holds for a model like the one that was checked. Alike are models for which
all of this is equal: classes and their code, attributes, hooks and modes of all modules, with what
their functions close over and read (as :mod:`torch_dpbayes.checks.model_state` looks at them);
names, shapes, types, devices and sharing of their tensors, and the values of buffers and frozen
parameters; the made-up records; the settings of the check; torch's own functions and switches, and
the kernels of layers. Values of trainable parameters may differ, as they do in training.
"""

from __future__ import annotations

import hashlib
import types
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy
import torch
import torch.nn.functional as F
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn

from ..clipping.layers import KINDS
from .model_state import CopiedTensor, is_same_leaf, leaves_of

_MANY = 8  # models
_COMPARABLE = (  # by value, or because nobody exchanges what is in them
    *(bool, int, float, complex, str, bytes, type(None), slice, range),
    *(tuple, list, frozenset, type, numpy.dtype, torch.dtype, torch.device, CopiedTensor),
    *(types.CodeType, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType),
    *(types.GetSetDescriptorType, types.WrapperDescriptorType, types.ModuleType),
)

_known: deque[tuple[ModelKey, Any]] = deque(maxlen=_MANY)


class ModelKey(NamedTuple):
    """What has to be equal."""

    leaves: Mapping[Any, Any]
    facts: Any

    def is_like(self, other: ModelKey) -> bool:
        """Whether a check of the one holds for the other."""
        return (
            self.facts == other.facts
            and self.leaves.keys() == other.leaves.keys()
            and all(is_same_leaf(leaf, other.leaves[what]) for what, leaf in self.leaves.items())
        )


def key_of(module: nn.Module, inputs: tuple[Any, ...], settings: Any) -> ModelKey | None:
    """The key of a model without anything of this library's attached to it; None where something
    cannot be compared, and the model has to be checked every time.
    """
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        return None  # what runs inside such a mode is not what runs outside
    try:
        leaves = leaves_of(module)
        if not all(isinstance(leaf, _COMPARABLE) for leaf in leaves.values()):
            return None
        for what, leaf in leaves.items():
            if isinstance(leaf, CopiedTensor):
                leaves[what] = _digest(leaf.copy)  # no copies of what may be data, or large
        return ModelKey(
            leaves, (_tensors_of(module), _described(inputs), settings, _surroundings())
        )
    except _CannotBeComparedError:
        return None


def recall(key: ModelKey | None) -> Any:
    """What was noted of a model like this one; None if there was none."""
    if key is None:
        return None
    return next((found for known, found in _known if known.is_like(key)), None)


def remember(before: ModelKey | None, after: ModelKey | None, found: Any) -> None:
    """Note what a check found out of a model, unless that changed on the way, say by a cache that
    the first pass fills.
    """
    if before is not None and after is not None and before.is_like(after):
        _known.append((before, found))


class _CannotBeComparedError(Exception):
    pass


def _digest(t: Tensor) -> tuple[Any, ...]:
    if t.layout is not torch.strided or t.is_quantized:
        raise _CannotBeComparedError
    whole = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return *_shape(t), hashlib.blake2b(whole.numpy().data, digest_size=16).digest()


def _shape(t: Tensor) -> tuple[Any, ...]:
    return type(t), tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad


def _tensors_of(module: nn.Module) -> list[Any]:
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    described: list[Any] = []
    for name, t in named:
        home = first.setdefault(id(t), name)
        values = _shape(t) if isinstance(t, nn.Parameter) and t.requires_grad else _digest(t)
        described.append((name, home, values))
    return described


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _digest(value)
    if isinstance(value, Mapping):
        return type(value), [(_described(key), _described(item)) for key, item in value.items()]
    if isinstance(value, (tuple, list)):
        return type(value), [_described(item) for item in value]
    if type(value) in (bool, int, float, str, type(None)):
        return type(value), value
    raise _CannotBeComparedError


def _surroundings() -> list[Any]:
    """What a model's program meets outside it."""
    backends = torch.backends
    return [
        torch.get_default_dtype(),
        torch.get_default_device(),
        [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        (torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()),
        (backends.cudnn.enabled, backends.cudnn.benchmark, backends.mkldnn.enabled),
        dict(KINDS),
        dict(GradSampleModule.GRAD_SAMPLERS),
        # exchanged functions, which the model's own code would not show
        *({k: v for k, v in vars(home).items() if callable(v)} for home in _TORCH),
    ]


_TORCH = (torch, Tensor, F, nn.Module, torch.linalg, torch.special, torch._C._nn)
