"""What all tests share: one thread for each process, Ctrl-C, and a fresh seed for each test,
printed when the test fails.
"""

import logging
import os
import signal

# test processes share the cores: more threads than cores slow all of them down
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections import Counter

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
# a test run in the background hands it down ignored, to programs that tests interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)

# .ci/run takes the examples that hypothesis takes, the default run a quarter of them
hypothesis.settings.register_profile("thorough", deadline=None, print_blob=True)
hypothesis.settings.register_profile(
    "torch_dpbayes", hypothesis.settings.get_profile("thorough"), max_examples=25
)
hypothesis.settings.load_profile("torch_dpbayes")

FIRST_CASES = 3  # of a test that the default run takes, where the test does not say how many

seed_key = pytest.StashKey[int]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: Counter[str] = Counter()
    for item in items:
        marker = item.get_closest_marker("first_cases")
        most = marker.args[0] if marker is not None else FIRST_CASES
        test = item.nodeid.partition("[")[0]
        cases[test] += 1
        if cases[test] > most:
            item.add_marker("thorough")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # a fresh process always starts torch's generator from the same built-in number: without this,
    # that is a chosen seed
    item.stash[seed_key] = torch.seed()


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
