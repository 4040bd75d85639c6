"""The file that a checkpoint of a private run is in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..errors import ArgumentError, ArgumentTypeError, CheckpointError
from ..optim.base import PrivateOptimizer
from ..posterior import files

_MODULE, _OPTIMIZER = "module_state_dict", "optimizer_state_dict"  # Opacus' names
_WRITER = "PrivacyEngine.save_checkpoint"


def save(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: PrivateOptimizer,
    checkpoint_dict: Mapping[str, Any] | None,
) -> None:
    """Write the states of both, and what else is to be kept, beside ``path`` and move it there."""
    state = {**(checkpoint_dict or {})}
    for name, of in ((_MODULE, module), (_OPTIMIZER, optimizer)):
        if name in state:
            raise ArgumentError(f"checkpoint_dict has the key {name!r}, which is used: rename it")
        state[name] = of.state_dict()
    files.save(state, path)


def load(
    path: str | os.PathLike[str], module: nn.Module, optimizer: PrivateOptimizer
) -> dict[str, Any]:
    """Go on from the file; returns what else was kept in it. No code in the file is run."""
    if not isinstance(optimizer, PrivateOptimizer):
        raise ArgumentTypeError(
            f"the optimizer is a {type(optimizer).__name__}: make the run private first, and"
            " pass the module and optimizer that make_private returned",
            code="optimizer-not-private",
        )
    state = files.load(path, _WRITER)
    if not {_MODULE, _OPTIMIZER} <= state.keys():
        raise CheckpointError(f"{os.fspath(path)} was not written by {_WRITER}")
    of_module = state.pop(_MODULE)
    _require_same_tensors(of_module, module)  # before charges are taken over
    optimizer.load_state_dict(state.pop(_OPTIMIZER))
    module.load_state_dict(of_module)
    return state


def _require_same_tensors(saved: Mapping[str, Any], module: nn.Module) -> None:
    """Raises unless what was saved has the names and shapes of the module's tensors."""
    own = module.state_dict()
    for name in [*saved, *own]:
        sides = [
            "missing" if name not in state else list(getattr(state[name], "shape", ()))
            for state in (saved, own)
        ]
        if sides[0] != sides[1]:
            raise CheckpointError(
                f"the checkpoint is of another network: {name!r} is {sides[0]} in the file and"
                f" {sides[1]} in the module. Load it into the network that was saved; nothing was"
                " changed."
            )
