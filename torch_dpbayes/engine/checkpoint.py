"""The file that a checkpoint of a private run is in."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ArgumentError, ArgumentTypeError, CheckpointError
from ..optim.base import PrivateOptimizer

_MODULE, _OPTIMIZER = "module_state_dict", "optimizer_state_dict"  # Opacus' names
_NOT_OURS = "{} was not written by PrivacyEngine.save_checkpoint"


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
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        torch.save(state, temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


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
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # whatever a file of something else makes of torch's reader
        raise CheckpointError(_NOT_OURS.format(os.fspath(path))) from error
    if not isinstance(state, dict) or not {_MODULE, _OPTIMIZER} <= state.keys():
        raise CheckpointError(_NOT_OURS.format(os.fspath(path)))
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
