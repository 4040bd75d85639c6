"""In which floating-point type does a model compute, and what does it compute in float32?"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..clipping.nested import tensors_in

FLOAT32 = torch.finfo(torch.float32).eps


class CoarsestType(TorchDispatchMode):
    """Notes ε of the coarsest floating-point type that any operation inside returns, float32 or
    coarser.
    """

    def __init__(self) -> None:
        super().__init__()
        self.eps = FLOAT32

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for t in tensors_in(result if isinstance(result, (tuple, list)) else (result,)):
            if t.is_floating_point():
                self.eps = max(self.eps, torch.finfo(t.dtype).eps)
        return result


class WithoutAutocast(TorchFunctionMode):
    """Operations compute in the types of what they are given, though the program that calls them
    has, and sees, autocast.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with ExitStack() as switched_off:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    switched_off.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **(kwargs or {}))
