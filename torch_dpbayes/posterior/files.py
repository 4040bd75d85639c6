"""Posterior samples in a file and in ArviZ's data structure."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import ArgumentTypeError, CheckpointError, SamplesError, StateError
from .outputs import difference_of

if TYPE_CHECKING:
    from .chain import Chain

_FILE_FORMAT = "torch_dpbayes.PosteriorSamples"
_FILE_VERSION = 1


def save(content: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write beside ``path`` and move there: if writing fails, an older file stays as it was."""
    content = {"format": _FILE_FORMAT, "version": _FILE_VERSION, **content}
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


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What :func:`save` wrote. No code in the file is run."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    # the unpickler meets broken bytes with whatever error they lead to
    except Exception as error:
        raise CheckpointError(
            f"{os.fspath(path)} is damaged or was not written by PosteriorSamples.save."
        ) from error
    if not isinstance(content, dict) or content.get("format") != _FILE_FORMAT:
        raise CheckpointError(
            f"{os.fspath(path)} holds something else: it was not written by PosteriorSamples.save."
        )
    if content["version"] != _FILE_VERSION:
        raise CheckpointError(
            f"{os.fspath(path)} is of format version {content['version']}; this release of"
            f" torch_dpbayes reads version {_FILE_VERSION}. Install a later release."
        )
    return content


def to_arviz(chains: Sequence[Chain]) -> Any:
    """The samples of several chains as ArviZ's data structure."""
    try:
        import arviz
    except ModuleNotFoundError as error:
        if error.name != "arviz":
            raise
        raise ModuleNotFoundError(
            "to_arviz needs ArviZ, which is not installed: pip install arviz", name="arviz"
        ) from error
    for number, chain in enumerate(chains, 1):
        if type(chain) is not type(chains[0]):
            raise ArgumentTypeError(
                f"chain {number} is a {type(chain).__name__}: pass PosteriorSamples one by one,"
                " first.to_arviz(second, third)."
            )
        if not len(chain):
            raise StateError(
                f"Chain {number} holds no sample yet: {chain!r}. Collect after burn-in, before"
                " the export."
            )
    first, *others = chains
    shapes = first.shapes()
    if taken := shapes.keys() & {"chain", "draw"}:
        raise SamplesError(
            f"A parameter is called {taken.pop()!r}, which ArviZ uses for a dimension and"
            " drops: rename it in the model."
        )
    for number, chain in enumerate(others, 2):
        if chain.shapes() != shapes:
            raise SamplesError(
                f"Chain {number} samples other parameters than the first one:"
                f" {difference_of(shapes, chain.shapes())}. Chains are compared parameter by"
                " parameter: pass runs of the same model with the same parameters frozen."
            )
        if (len(chain), chain.thin) != (len(first), first.thin):
            raise SamplesError(
                f"Chain {number} holds {len(chain)} samples with thin={chain.thin}, the first"
                f" one {len(first)} with thin={first.thin}: collect all with the same burn_in,"
                " thin and max_samples, as often."
            )
    posterior = {name: np.stack([chain.draws_of(name) for chain in chains]) for name in shapes}
    if int(arviz.__version__.split(".")[0]) < 1:
        return arviz.from_dict(posterior=posterior)
    return arviz.from_dict({"posterior": posterior})
