"""Hooks on gradients, which may mix records where no check sees it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

HOOKED = (
    "{} has a hook on gradients ({}), which may mix records where no check sees it. Remove it; to "
    "change gradients record by record use the loss, or a custom torch.autograd.Function."
)


class HookWatch(TorchFunctionMode):
    """Finds hooks that a forward pass registers on tensors; those of this library are no such
    hooks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
            hook = args[1] if len(args) > 1 else next(iter((kwargs or {}).values()), None)
            owner = type(getattr(hook, "__self__", None)).__module__
            if not owner.startswith("torch_dpbayes."):
                self.found = function.__name__
        return function(*args, **(kwargs or {}))


def require_no_hooks(module: nn.Module) -> None:
    """Raise if a module has hooks of the caller's on its backward pass.

    Raises:
        ValueError: with the module's name.
    """
    ours = {handle.id for handle in getattr(module, "autograd_grad_sample_hooks", ())}  # Opacus'
    for name, layer in module.named_modules():
        for kind in ("_backward_hooks", "_backward_pre_hooks"):
            if not ours.issuperset(vars(layer)[kind]):
                what = "register_full_backward" + kind.removeprefix("_backward").removesuffix("s")
                raise ValueError(HOOKED.format(f"module {name or type(layer).__name__!r}", what))
