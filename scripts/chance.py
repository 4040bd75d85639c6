"""Adds up the probabilities with which tests fail when all is right: those that they state.

    python scripts/chance.py                  # of all tests
    python scripts/chance.py -m 'not slow'    # arguments go to pytest, which only collects

A statistical test states them by ``@pytest.mark.chance(p)``: p for one look, and it fails if two
independent looks failed, so that p² counts. tests/conftest.py looks again, and refuses a run whose
sum is above 1e-4. The list has the sums by file, and tests that compare with a significance but
state no probability.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STATISTICAL = re.compile(
    r"FALSE_ALARM|\bSIGMAS\b|\bALPHA\b|ALLOWED|pvalue|requires_law\(|(?<![.\w])fits\("
)


class Collected:
    """Items of a collection, as a plugin of pytest."""

    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = list(session.items)


def main(arguments: list[str]) -> int:
    found, printed = Collected(), io.StringIO()
    command = ["--collect-only", "-q", "-p", "no:cacheprovider", "-n", "0", "--rootdir", str(ROOT)]
    selected = arguments or ["-m", ""]
    with contextlib.redirect_stdout(printed):
        code = pytest.main([*command, *selected, str(ROOT / "tests")], plugins=[found])
    if code:
        print(printed.getvalue())
        return int(code)
    chances: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    silent = set()
    for item in found.items:
        rules = item.config.pluginmanager.get_plugin(str(ROOT / "tests/conftest.py"))
        name, marker = item.nodeid.partition("::")[0], item.get_closest_marker("chance")
        if marker is not None:
            chances[name] += rules.chance_of(item)
            counts[name] += 1
        elif isinstance(item, pytest.Function):
            source = inspect.getsource(inspect.unwrap(item.function))
            if STATISTICAL.search(source):
                silent.add(item.nodeid.partition("[")[0])
    for name in sorted(chances, key=chances.__getitem__, reverse=True):
        print(f"{chances[name]:9.1e}  {counts[name]:4} tests  {name}")
    total = sum(chances.values())
    print(f"{total:9.1e}  {sum(counts.values()):4} tests in all")
    if silent:
        print(f"{len(silent)} compare with a significance and state no chance:")
        print(*(f"    {name}" for name in sorted(silent)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
