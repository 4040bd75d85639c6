"""Within the density each file needs only those before it."""

import ast
from pathlib import Path

from torch_dpbayes import density

ORDER = [
    "pyro_runs",
    "pieces",
    "recording",
    "prior",
    "arguments",
    "structure",
    "record_terms",
    "locality",
    "program",
    "record_density",
    "record_statistics",
]


def test_arrows_run_one_way():
    folder = Path(density.__file__).parent
    assert {path.stem for path in folder.glob("*.py")} == {*ORDER, "__init__"}
    for place, name in enumerate(ORDER):
        tree = ast.parse((folder / f"{name}.py").read_text())
        needed = {
            node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.level == 1
        }
        assert needed <= set(ORDER[:place]), name
