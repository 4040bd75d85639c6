"""A module that runs through a ``forward`` of ours, until its own is given back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

from torch import Tensor, nn


class ReplacedForward(ABC):
    """Takes the place of a module's ``forward``.

    Args:
        module: the module.
        owners: those of its modules whose parameters :meth:`run_with` exchanges.
    """

    def __init__(self, module: nn.Module, owners: Sequence[nn.Module]) -> None:
        self.module, self.owners = module, owners
        self.original: Callable[..., Any] = module.forward
        self.had_own = "forward" in module.__dict__
        module.__dict__["forward"] = self.forward

    def __getstate__(self) -> dict[str, Any]:
        """A bound method is pickled by its name, which is taken."""
        return {k: v for k, v in self.__dict__.items() if k != "original" or self.had_own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self.had_own:
            self.original = MethodType(type(self.module).forward, self.module)

    def remove(self) -> None:
        """Give the module its own ``forward`` back."""
        if self.had_own:
            self.module.__dict__["forward"] = self.original
        else:
            self.module.__dict__.pop("forward", None)

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What runs in place of the module's own."""

    def run_with(self, values: Mapping[Tensor, Tensor], args: Any, kwargs: Any) -> Any:
        """The module's own forward pass, with other tensors in place of its parameters."""
        before = [(owner, owner._parameters) for owner in self.owners]
        for owner, parameters in before:
            owner.__dict__["_parameters"] = {
                n: None if p is None else values.get(p, p) for n, p in parameters.items()
            }
        try:
            return self.original(*args, **kwargs)
        finally:
            for owner, parameters in before:
                owner.__dict__["_parameters"] = parameters
