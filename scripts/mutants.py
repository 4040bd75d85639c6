#!/usr/bin/env python3
"""Whether the tests find faults: each mutant of tests/mutants/ has to fail the tests beside it.

    scripts/mutants.py [TEXT ...]

runs all mutants, or those of files whose names contain one of the texts, each in a copy of the
package. It ends with 1 if one survives. In a list, a heading names a file of the package and the
tests that find its mutants. Each mutant has the lines that it removes, and the lines put in their
place:

    optim/sghmc.py: optim
    -_mul_(velocities, 1 - friction)
    +_mul_(velocities, 1.0)
    -_mul_(velocities, math.sqrt(lr / before))
    +_mul_(velocities, lr / before)
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
LISTS = ROOT / "tests" / "mutants"  # one of each room
MOST_SECONDS = 600  # of a mutant's tests; one that never ends is found, too
REWRITTEN = "ignore::pytest.PytestAssertRewriteWarning"  # of what was imported before the fork


class Mutant(NamedTuple):
    """A fault that the tests have to find."""

    file: str
    tests: list[str]
    old: str
    new: str

    def applied_to(self, package: Path) -> str:
        """The file's text with the fault in it."""
        text = (package / self.file).read_text()
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} has {found} times what a mutant replaces: {self.old!r}")
        return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    """All mutants of the lists."""
    found = []
    for path in sorted(LISTS.glob("*.txt")):
        for block in path.read_text().strip().split("\n\n"):
            head, *lines = block.splitlines()
            file, tests = head.split(": ")
            names = [f"tests/{name}" for name in tests.split()]
            runs = [[*run] for _, run in groupby(lines, key=lambda line: line[0])]  # of "-", of "+"
            texts = ["\n".join(line[1:] for line in run) for run in runs]
            for old, new in zip(texts[::2], texts[1::2], strict=True):
                found.append(Mutant(file, names, old, new))
    return found


def load_what_tests_import() -> None:
    """Once for all mutants, whose tests run in forked processes; not this library itself."""
    for name in "pyro.infer opacus dp_accounting.pld scipy.stats hypothesis torch._dynamo".split():
        importlib.import_module(name)


def fails(mutant: Mutant, tree: Path) -> bool:
    """Whether the mutant's tests fail in this copy of the project."""
    path = tree / "torch_dpbayes" / mutant.file
    text = path.read_text()
    faulty = mutant.applied_to(tree / "torch_dpbayes")
    ast.parse(faulty)  # what is no Python fails every test
    path.write_text(faulty)
    try:
        code = code_of(mutant.tests, tree)
    finally:
        path.write_text(text)
    if code not in (0, 1, 2, None):  # other codes: the run did not happen; 2: it was interrupted
        raise RuntimeError(f"{mutant}: pytest ended with {code}")
    return code != 0


def code_of(tests: list[str], tree: Path) -> int | None:
    """The exit code of pytest on these tests; None: they took too long."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        code = 70
        try:
            os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
            os.chdir(tree)
            sys.path.insert(0, str(tree))
            sys.dont_write_bytecode = True
            out = os.open(os.devnull, os.O_WRONLY)
            os.dup2(out, 1)
            os.dup2(out, 2)
            options = "-x -q --tb=no -n 0 -p no:cacheprovider"
            code = int(pytest.main([*options.split(), "-m", "not slow", "-W", REWRITTEN, *tests]))
        finally:
            os._exit(code)
    until = time.monotonic() + MOST_SECONDS
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("texts", nargs="*", help="parts of files' names; all files if none")
    texts = parser.parse_args().texts or [""]
    wanted = [m for m in mutants() if any(text in m.file for text in texts)]
    survivors = 0
    load_what_tests_import()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "project"
        ignored = shutil.ignore_patterns(".*", "build", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT, tree, ignore=ignored)
        for k, mutant in enumerate(wanted, 1):
            began = time.monotonic()
            is_found = fails(mutant, tree)
            survivors += not is_found
            word = "found" if is_found else "SURVIVED"
            print(f"{k}/{len(wanted)} {word} {time.monotonic() - began:.0f} s", end=" ")
            print(f"{mutant.file}: {mutant.old.strip()!r} -> {mutant.new.strip()!r}", flush=True)
    print(f"{survivors} of {len(wanted)} mutants survived")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
