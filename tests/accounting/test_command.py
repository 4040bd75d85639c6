"""The command: what a ledger holds, and what a plan costs."""

import json
import os
import subprocess
import sys

import pytest
from dp_accounting.dp_event import LaplaceDpEvent
from support.ledgers import DELTA, STEP

from torch_dpbayes.accounting import PrivacyAccountant
from torch_dpbayes.accounting.__main__ import main
from torch_dpbayes.accounting.accountant import look_at
from torch_dpbayes.accounting.events import GaussianDpEvent, PoissonSampledDpEvent


@pytest.fixture
def full(path):
    with PrivacyAccountant(3.0, DELTA, path=path) as accountant:
        for _ in range(50):
            accountant.compose(STEP, label="DPSGLD")
        accountant.compose(GaussianDpEvent(40.0), label="report")
        accountant.compose(PoissonSampledDpEvent(0.01, LaplaceDpEvent(50.0)), label="laplace")
        yield accountant.compose(STEP, label="DPSGLD")


def test_the_command_says_what_there_is(full, path, capsys):
    before = path.read_bytes()
    assert main([str(path)]) == 0
    said = capsys.readouterr().out
    for part in ("DPSGLD", "report", "epsilon = 3", "left for a new job", f"pid {os.getpid()}"):
        assert part in said
    assert main([str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["budget"] == {"epsilon": 3.0, "delta": DELTA}
    assert found["epsilon"] == pytest.approx(look_at(path)[0].get_epsilon())
    assert {entry["label"]: entry["releases"] for entry in found["labels"]}["DPSGLD"] >= 51
    assert sum(block["count"] for block in found["open_blocks"]) > 0
    assert found["remaining"][0]["steps"] > 0
    assert path.read_bytes() == before


def test_the_command_explains_what_it_cannot_read(tmp_path, capsys):
    (tmp_path / "x.db").write_bytes(b"no database at all " * 100)
    for name in ("x.db", "none.db"):
        assert main([str(tmp_path / name)]) == 1
        assert name in capsys.readouterr().err
    assert not (tmp_path / "none.db").exists()
    assert main([str(tmp_path / "none.db")]) == 1
    assert capsys.readouterr().err.startswith("no such file")


@pytest.mark.thorough
def test_the_command_imports_neither_torch_nor_opacus(full, path):
    program = (
        f"import runpy, sys\nsys.argv = ['accounting', {str(path)!r}]\ntry:"
        " runpy.run_module('torch_dpbayes.accounting', run_name='__main__')\nexcept SystemExit as"
        " end: assert not end.code\nprint(*sorted({'torch', 'opacus', 'pyro', 'matplotlib'} &"
        " set(sys.modules)), file=sys.stderr)"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "ignore::RuntimeWarning", "-c", program],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stderr.split() == []
    assert "DPSGLD" in ran.stdout


# --- plans without a ledger -----------------------------------------------------------------------

PLAN = ["--noise-multiplier", "1", "--sample-rate", ".01", "--delta", "1e-5"]


def said(capsys, *arguments):
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_cost_of_a_plan(capsys):
    """The table of reference values, of other accountants, and the calibration's numbers."""
    epsilon = said(capsys, "epsilon", *PLAN, "--steps", "10000")["epsilon"]
    assert epsilon == pytest.approx(6.188, abs=2e-3)
    replaced = ["--steps", "10000", "--neighboring", "replace_one"]
    epsilon = said(capsys, "epsilon", *PLAN, *replaced)["epsilon"]
    assert epsilon == pytest.approx(10.881, rel=1e-3)
    found = said(capsys, "compare", *PLAN, "--steps", "10000")
    assert found["gdp_lower_bound"] == pytest.approx(6.007, abs=1e-3)
    assert found["gdp_lower_bound"] < found["pld"] < found["rdp"] < found["replace_one"]
    assert found["rdp"] == pytest.approx(6.713, abs=1e-3)
    steps = said(capsys, "steps", *PLAN, "--epsilon", "3")["steps"]
    assert steps == PrivacyAccountant(3.0, DELTA).remaining(STEP)
    goal = ["--epsilon", "3", "--delta", "1e-5", "--sample-rate", ".01", "--steps", str(steps)]
    assert said(capsys, "noise", *goal)["noise_multiplier"] == pytest.approx(1.0, rel=1e-3)
    assert main(["compare", *PLAN, "--steps", "100"]) == 0
    assert "Renyi curves " in capsys.readouterr().out
    full = ["--noise-multiplier", "1", "--sample-rate", "1", "--delta", "1e-5", "--steps", "4"]
    exact = PrivacyAccountant().compose(GaussianDpEvent(0.5)).get_epsilon(DELTA)
    assert said(capsys, "compare", *full)["gdp_lower_bound"] == pytest.approx(exact)


def test_a_plan_that_makes_no_sense_is_explained(capsys):
    assert main(["epsilon", *PLAN[:2], "--sample-rate", "2", *PLAN[4:], "--steps", "9"]) == 1
    assert "must lie in (0, 1]" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["steps", *PLAN])
