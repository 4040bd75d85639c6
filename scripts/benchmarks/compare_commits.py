"""Shows whether two commits compute the same, seeded runs to the last bit, epsilon to all digits.

    python scripts/benchmarks/compare_commits.py main         # main against the files as they are
    python scripts/benchmarks/compare_commits.py v0.1.0 HEAD --only "history:"

Each commit is checked out in a temporary folder, and recorded_runs.py, as it stands here, runs with
it in this program's environment. The exit status is 1 if anything differs or a run fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def tree_of(commit: str | None) -> Iterator[Path]:
    """A folder with the files of a commit; None: as they are."""
    if commit is None:
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as folder:
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", folder, commit], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run([*git, "remove", "--force", folder], check=True)


def recorded(commit: str | None, only: str) -> dict[str, Any]:
    """The runs of recorded_runs.py with the library of this commit."""
    program = Path(__file__).with_name("recorded_runs.py")
    with tree_of(commit) as tree, tempfile.NamedTemporaryFile(suffix=".pt") as file:
        command = [sys.executable, str(program), file.name, "--only", only]
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, cwd=tree)
        found = torch.load(file.name, weights_only=False)  # written a moment ago by ourselves
        if not Path(found["library"]).is_relative_to(tree):
            raise SystemExit(f"the environment's own library was run, not that of {tree}")
    return found["runs"]


def difference(first: Any, second: Any) -> str:
    """How two values differ; empty if they are equal to the last bit."""
    if isinstance(first, str) or isinstance(second, str):
        return "" if first == second else f"{str(first)[:300]} became {str(second)[:300]}"
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.dtype != second.dtype or first.shape != second.shape:
            return f"{first.dtype} {tuple(first.shape)} became {second.dtype} {tuple(second.shape)}"
        one, other = first.double().numpy(), second.double().numpy()
        if one.tobytes() == other.tobytes():
            return ""
        return f"differs by up to {np.nanmax(np.abs(one - other)):.3g}"
    return "" if repr(first) == repr(second) else f"{first!r} became {second!r}"


def differences(first: Any, second: Any) -> list[str]:
    """How two runs differ."""
    for run in (first, second):
        if isinstance(run, str):
            return [f"no result: {run}"]
    names = dict.fromkeys([*first, *second])
    found = {
        name: difference(first[name], second[name])
        if name in first and name in second
        else "is there only once"
        for name in names
    }
    return [f"{name}: {text}" for name, text in found.items() if text]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", help="a commit")
    parser.add_argument("second", nargs="?", help="another; left out: the files as they are")
    parser.add_argument("--only", default="", help="runs whose names hold this text")
    given = parser.parse_args()
    first, second = recorded(given.first, given.only), recorded(given.second, given.only)
    equal, all_of = Counter[str](), Counter[str]()
    for name in dict.fromkeys([*first, *second]):
        kind = name.partition(":")[0]
        missing = "this version has no such run"
        found = differences(first.get(name, missing), second.get(name, missing))
        all_of[kind] += 1
        equal[kind] += not found
        for line in found[:5]:
            print(f"{name}\n    {line}")
    print(f"{'kind of run':28}{'equal':>8}{'of':>8}")
    for kind, count in all_of.items():
        print(f"{kind:28}{equal[kind]:>8}{count:>8}")
    return int(not all_of or equal != all_of)


if __name__ == "__main__":
    sys.exit(main())
