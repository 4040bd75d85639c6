"""What all tests share: one thread for each process, Ctrl-C, and a fresh seed for each test,
printed when the test fails.
"""

import gc
import logging
import os
import random
import signal

import hypothesis
import pytest

# test processes share the cores: more threads than cores slow all of them down
os.environ.setdefault("OMP_NUM_THREADS", "1")
# a test run in the background hands it down ignored, to programs that tests interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)

# .ci/run takes the examples that hypothesis takes, the default run a quarter of them
hypothesis.settings.register_profile("thorough", deadline=None, print_blob=True)
hypothesis.settings.register_profile(
    "torch_dpbayes", hypothesis.settings.get_profile("thorough"), max_examples=25
)
hypothesis.settings.load_profile("torch_dpbayes")

LOOKS = 2  # at a statistical test that does not say how many
LARGEST_CHANCE = 1e-4  # that a run of all tests fails when all is right

seed_key = pytest.StashKey[int]()


def chance_of(item: pytest.Item) -> float:
    """That this test fails when all is right; 0 if it states none."""
    marker = item.get_closest_marker("chance")
    return marker.args[0] ** marker.kwargs.get("looks", LOOKS) if marker is not None else 0.0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if (total := sum(map(chance_of, items))) > LARGEST_CHANCE:
        raise pytest.UsageError(
            f"tests fail by chance once in {1 / total:.0f} runs: scripts/chance.py names them"
        )


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays: the library's own searches for garbage look at less. And Python's
    come less often: models that are traced make much that lives for a moment.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def fresh_seed() -> int:
    """Of torch, which would else start from the same built-in number: that is a chosen seed. And
    Python and NumPy go on with no seed that an earlier test has set.
    """
    import numpy as np  # not in the process of xdist that runs no test
    import torch

    random.seed()
    np.random.seed()
    torch.set_num_threads(1)
    return torch.default_generator.seed()  # those of accelerators, too, take a millisecond


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[seed_key] = fresh_seed()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test with ``@pytest.mark.chance(p)`` fails by chance with probability p or less. It is run
    again with fresh seeds where an assertion failed, and fails if ``looks`` runs (2) failed.
    """
    marker = pyfuncitem.get_closest_marker("chance")
    if marker is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    for _ in range(marker.kwargs.get("looks", LOOKS) - 1):
        try:
            pyfuncitem.obj(**arguments)
            return True
        except AssertionError as error:
            print(f"failed once, looked again: {str(error)[:300]}")
            pyfuncitem.stash[seed_key] = fresh_seed()
            if "monkeypatch" in pyfuncitem.funcargs:
                pyfuncitem.funcargs["monkeypatch"].undo()
    return None  # pytest runs it for the last time


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed and seed_key in item.stash:
        report.sections.append(
            ("seed", f"to run it again as it was: torch.manual_seed({item.stash[seed_key]})")
        )
    return report


@pytest.fixture(autouse=True)
def _logs_as_before():
    """Scripts that a test runs in this process silence the log, and later tests read it."""
    log, disabled = logging.getLogger("torch_dpbayes"), logging.root.manager.disable
    level = log.level
    yield
    log.setLevel(level)
    logging.disable(disabled)


@pytest.fixture
def double():
    """New tensors have 64 bits, so that closed forms can be compared to the last digits."""
    import torch

    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
