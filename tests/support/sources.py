"""The library's files, parsed."""

import ast
from functools import cache
from pathlib import Path

import torch_dpbayes

ROOT = Path(torch_dpbayes.__file__).parent


@cache
def trees() -> dict[str, ast.Module]:
    """By names such as ``optim/sgld.py``."""
    paths = sorted(ROOT.rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in paths}
