"""Which layers rule out per-record gradients by what they are?"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.weight_norm import WeightNorm

FIX = (
    "Replace it by a layer that treats each record by itself:"
    " opacus.validators.ModuleValidator.fix(model) turns BatchNorm into GroupNorm and untracks"
    " InstanceNorm."
)
BATCH_NORM_TO_EVAL = '[m.eval() for m in model.modules() if "BatchNorm" in type(m).__name__]'


def check_layers(module: nn.Module, *, is_mapped: bool = False) -> None:
    """Raise where the kind of a layer, or eval mode, already rules out per-record gradients.

    Args:
        module: the model, before any hooks are attached.
        is_mapped: the model will run for each record alone, where torch's own attention is no
            obstacle.

    Raises:
        ValueError: with the layer's name and the remedy.
    """
    norms = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    if not module.training:
        raise ValueError(
            "the model is in eval mode, in which no per-record gradients are recorded: call"
            " model.train() first"
            + (f", and keep frozen BatchNorm in eval mode by {BATCH_NORM_TO_EVAL}" if norms else "")
        )
    for name, layer in module.named_modules():
        if any(type(hook) is WeightNorm for hook in layer._forward_pre_hooks.values()):
            raise ValueError(
                f"module {name!r} has torch's old weight_norm, whose weight is left over from the"
                " last forward pass: take torch.nn.utils.parametrizations.weight_norm, after"
                " torch.nn.utils.remove_weight_norm"
            )
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None:
            raise ValueError(
                f"module {name!r} renormalises rows of its weight in the forward pass (max_norm),"
                " which tells without noise which ones the batch uses. Leave out max_norm."
            )
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.scale_grad_by_freq:
            raise ValueError(
                f"module {name!r} divides gradients by how often a token occurs in the batch"
                " (scale_grad_by_freq), which depends on the other records. Leave it out."
            )
        if (reason := _reason(layer, is_mapped)) is not None:
            raise ValueError(
                f"module {name or type(module).__name__!r}, {type(layer).__name__}, {reason}"
            )


def _reason(layer: nn.Module, is_mapped: bool) -> str | None:
    """Why a layer's kind rules out per-record gradients, and what to write."""
    is_trained = any(p.requires_grad for p in layer.parameters())
    # their own classes only: what a subclass does is tried out
    kind = type(layer) if type(layer).__module__.startswith("torch.nn.") else nn.Module
    if issubclass(kind, _BatchNorm) and is_trained:
        return (
            "mixes the records of a batch: model = opacus.validators.ModuleValidator.fix(model)"
            " makes it GroupNorm. Pretrained statistics stay if it is frozen and in eval mode."
        )
    if (
        issubclass(kind, _BatchNorm)
        and layer.affine  # else there was nothing to freeze
        and layer.training
        and layer.track_running_stats
    ):
        return (
            "is frozen, but in training mode, in which its statistics follow the records. After"
            f" model.train() write {BATCH_NORM_TO_EVAL}"
        )
    if issubclass(kind, _InstanceNorm) and is_trained and layer.track_running_stats:
        return (
            "keeps statistics of the records: track_running_stats=False, or"
            " model = opacus.validators.ModuleValidator.fix(model)."
        )
    if issubclass(kind, nn.RNNBase) and is_trained:
        remedy = (
            "write opacus.layers.DPRNN"
            if kind is nn.RNN
            else "model = opacus.validators.ModuleValidator.fix(model) makes it"
            f" opacus.layers.DP{kind.__name__}"
        )
        return f"gives no gradients by record: {remedy}."
    if issubclass(kind, nn.MultiheadAttention) and is_trained and not is_mapped:
        return (
            "gives no gradients by record: model = opacus.validators.ModuleValidator.fix(model)"
            " makes it opacus.layers.DPMultiheadAttention."
        )
    return None
