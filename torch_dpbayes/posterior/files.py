"""Posterior samples in a file and in ArviZ's data structure."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError

FORMAT = "torch_dpbayes.PosteriorSamples, version 1"


def save(content: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a temporary file and rename it: if writing fails, an older file is unchanged."""
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
    """Read what :func:`save` wrote for ``writer``. No code in the file is run."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    # the unpickler may raise any error on damaged bytes
    except Exception as error:
        message = f"{os.fspath(path)} is damaged or was not written by {writer}"
        raise CheckpointError(message) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{os.fspath(path)} was not written by {writer}")
    return content


def array_of(sample: Tensor) -> np.ndarray[Any, Any]:
    """As a NumPy array of float32 or wider: half precision is too coarse for variances."""
    return np.asarray(sample.to("cpu", torch.promote_types(sample.dtype, torch.float32)))


def arviz_of(posterior: dict[str, Any]) -> Any:
    """ArviZ's structure of variables ``[chain, draw, ...]``."""
    import arviz

    if int(arviz.__version__.split(".")[0]) < 1:
        return arviz.from_dict(posterior=posterior)
    return arviz.from_dict({"posterior": posterior})
