"""Posterior samples in a file and in ArviZ's data structure."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import CheckpointError, SamplesError
from .outputs import difference_of

if TYPE_CHECKING:
    from .chain import Chain

FORMAT = "torch_dpbayes.PosteriorSamples, version 1"


def save(content: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write beside ``path`` and move there: if writing fails, an older file stays as it was."""
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with open(temporary, "xb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: str | os.PathLike[str], writer: str) -> dict[str, Any]:
    """What :func:`save` wrote for ``writer``. No code in the file is run."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    # the unpickler meets broken bytes with whatever error they lead to
    except Exception as error:
        message = f"{os.fspath(path)} is damaged or was not written by {writer}"
        raise CheckpointError(message) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{os.fspath(path)} was not written by {writer}")
    return content


def arviz_of(posterior: dict[str, Any]) -> Any:
    """ArviZ's structure of variables ``[chain, draw, ...]``."""
    try:
        import arviz
    except ModuleNotFoundError as error:
        if error.name != "arviz":
            raise
        raise ModuleNotFoundError(
            "to_arviz needs ArviZ, which is not installed: pip install arviz", name="arviz"
        ) from error
    if int(arviz.__version__.split(".")[0]) < 1:
        return arviz.from_dict(posterior=posterior)
    return arviz.from_dict({"posterior": posterior})


def to_arviz(chains: Sequence[Chain]) -> Any:
    """The samples of several chains as ArviZ's data structure."""
    first = chains[0]
    shapes = first.shapes()
    if taken := shapes.keys() & {"chain", "draw"}:
        raise SamplesError(
            f"A parameter is called {taken.pop()!r}, which ArviZ uses for a dimension and"
            " drops: rename it in the model."
        )
    for number, chain in enumerate(chains, 1):
        if type(chain) is not type(first) or not len(chain):
            raise SamplesError(
                f"chain {number} is {chain!r}: pass PosteriorSamples that hold samples one by one,"
                " first.to_arviz(second, third)."
            )
        own = {"samples": len(chain), "thin": chain.thin}
        differs = difference_of(shapes, chain.shapes())
        if differs or own != {"samples": len(first), "thin": first.thin}:
            raise SamplesError(
                f"chain {number} is not like the first one, {first!r}: {differs or repr(chain)}."
                " Pass runs of one model with the same burn_in, thin and max_samples, collected as"
                " often."
            )
    return arviz_of({name: np.stack([chain.draws_of(name) for chain in chains]) for name in shapes})
