"""Which layers rule out per-record gradients by what they are?"""

from __future__ import annotations

from opacus.validators import ModuleValidator
from torch import nn
from torch.nn.utils.weight_norm import WeightNorm

FIX = (
    "Replace it by a layer that treats each record by itself:"
    " opacus.validators.ModuleValidator.fix(model) turns BatchNorm into GroupNorm and untracks"
    " InstanceNorm."
)
_ATTENTION = (
    "Take opacus.layers.DPMultiheadAttention, or write attention with nn.Linear layers for queries,"
    " keys and values and torch.nn.functional.scaled_dot_product_attention."
)


def check_layers(module: nn.Module, *, is_mapped: bool = False) -> None:
    """Raise where the kind of a layer, or eval mode, already rules out per-record gradients.

    Args:
        module: the model, before any hooks are attached.
        is_mapped: the model will run for each record alone, where torch's own attention is no
            obstacle.

    Raises:
        ValueError: with the layer's name and the remedy.
    """
    if not module.training:
        raise ValueError(
            "the model is in eval mode, in which no per-record gradients are recorded: call"
            " model.train() first"
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
        if is_mapped and isinstance(layer, nn.MultiheadAttention):
            continue
        validate = ModuleValidator.VALIDATORS.get(type(layer))
        errors = (
            validate(layer)
            if validate is not None and any(p.requires_grad for p in layer.parameters())
            else []
        )
        if errors:
            fix = _ATTENTION if isinstance(layer, nn.MultiheadAttention) else FIX
            raise ValueError(
                f"module {name or type(module).__name__!r} cannot be trained privately: {errors[0]}"
                f" {fix}"
            )
