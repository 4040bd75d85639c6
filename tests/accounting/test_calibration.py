"""Calibration is safe and close; and the command, which plans, and says what a ledger holds."""

import json
import os
import subprocess
import sys

import dp_accounting as dpa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.ledgers import DELTA, STEP, sampled

from torch_dpbayes.accounting import (
    PrivacyAccountant,
    get_noise_multiplier,
    get_num_steps,
    noise_multiplier_for,
)
from torch_dpbayes.accounting.__main__ import main
from torch_dpbayes.accounting.accountant import look_at
from torch_dpbayes.accounting.events import GaussianDpEvent, UnspecifiedBatchGaussianDpEvent
from torch_dpbayes.errors import ArgumentError

RELATIONS = ("add_or_remove_one", "replace_one")


@given(
    epsilon=st.floats(0.1, 20.0),
    rate=st.floats(1e-3, 1.0),
    steps=st.integers(1, 3000),
    neighboring=st.sampled_from(RELATIONS),
)
@examples(12)
def test_result_is_safe_and_close(epsilon, rate, steps, neighboring):
    target = {"target_epsilon": epsilon, "target_delta": 1e-5}
    noise = get_noise_multiplier(**target, sample_rate=rate, steps=steps, neighboring=neighboring)

    def spent(multiplier):
        accountant = PrivacyAccountant(neighboring=neighboring)
        accountant.compose(sampled(multiplier, rate), steps)
        return accountant.get_epsilon(1e-5)

    assert spent(noise) <= epsilon
    if noise > 0.02:
        assert spent(noise * 0.999) > epsilon


def test_history_counts():
    accountant = PrivacyAccountant(2.0, 1e-5).compose(sampled(1.2, 0.02), 200)
    plan = {"target_epsilon": 2.0, "target_delta": 1e-5, "sample_rate": 0.01, "steps": 500}
    fresh = get_noise_multiplier(**plan)
    noise = get_noise_multiplier(**plan, history=accountant.history)
    assert noise > fresh
    accountant.compose(sampled(noise), 500)
    assert accountant.get_epsilon() <= 2.0
    with pytest.raises(ArgumentError):
        get_noise_multiplier(**{**plan, "target_epsilon": 0.5}, history=accountant.history)
    adaptive = PrivacyAccountant(3.0, 1e-5).compose(STEP, adaptive=True)
    with pytest.raises(ArgumentError):
        get_noise_multiplier(**plan, history=adaptive.history)


def test_the_method_is_the_accountant_s():
    target = {"target_epsilon": 2.0, "target_delta": 1e-5, "steps": 9}
    noise = noise_multiplier_for(GaussianDpEvent, **target, method="rdp")
    accountant = PrivacyAccountant(method="rdp").compose(GaussianDpEvent(noise), 9)
    assert 0.998 * 2.0 <= accountant.get_epsilon(1e-5) <= 2.0


def test_any_event():
    target = {"target_epsilon": 1.0, "target_delta": 1e-5, "steps": 16}
    with pytest.raises(ArgumentError):
        noise_multiplier_for(UnspecifiedBatchGaussianDpEvent, **target)
    noise = noise_multiplier_for(
        UnspecifiedBatchGaussianDpEvent, **target, neighboring="replace_one"
    )
    assert noise == pytest.approx(dpa.get_sigma_gaussian(1.0, 1e-5) * 8.0, rel=1e-3)


@pytest.mark.parametrize("history", [[], [(sampled(1.2, 0.02), 200)]])
@pytest.mark.parametrize("neighboring", RELATIONS)
def test_number_of_steps_is_the_largest(neighboring, history):
    target = {"sample_rate": 0.01, "target_epsilon": 3.0, "target_delta": 1e-5}
    settings = {**target, "neighboring": neighboring, "history": history}
    steps, spent = get_num_steps(**settings, noise_multiplier=1.0), []
    for more in (0, 1):
        accountant = PrivacyAccountant(neighboring=neighboring)
        for event, count in history:
            accountant.compose(event, count)
        spent.append(accountant.compose(STEP, steps + more).get_epsilon(1e-5))
    assert spent[0] <= 3.0 < spent[1]
    assert get_num_steps(**settings, noise_multiplier=0.1) == 0


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def full(path):
    with PrivacyAccountant(3.0, DELTA, path=path) as accountant:
        for _ in range(50):
            accountant.compose(STEP, label="DPSGLD")
        accountant.compose(GaussianDpEvent(40.0), label="report")
        laplace = dpa.PoissonSampledDpEvent(0.01, dpa.LaplaceDpEvent(50.0))
        accountant.compose(laplace, label="laplace")
        yield accountant.compose(STEP, label="DPSGLD")


def test_the_command_says_what_there_is(full, path, capsys):
    before = path.read_bytes()
    assert main([str(path)]) == 0
    said = capsys.readouterr().out
    for part in ("DPSGLD", "report", "epsilon = 3", "left for a new job, of each"):
        assert part in said
    assert f"pid {os.getpid()}" in said
    assert main([str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["budget"] == {"epsilon": 3.0, "delta": DELTA}
    assert found["epsilon"] == pytest.approx(look_at(path)[0].get_epsilon())
    assert {entry["label"]: entry["releases"] for entry in found["labels"]}["DPSGLD"] >= 51
    assert sum(block["count"] for block in found["open_blocks"]) > 0
    assert found["remaining"][0]["steps"] > 0
    assert path.read_bytes() == before


OPTIONS = ["--noise-multiplier", "1", "--sample-rate", ".01", "--delta", "1e-5"]


def test_the_command_explains_what_it_cannot_read_or_plan(tmp_path, capsys):
    (tmp_path / "x.db").write_bytes(b"no database at all " * 100)
    for name in ("x.db", "none.db"):
        assert main([str(tmp_path / name)]) == 1
        assert name in capsys.readouterr().err
    assert not (tmp_path / "none.db").exists()
    assert main([str(tmp_path / "none.db")]) == 1
    assert capsys.readouterr().err.startswith("no such file")
    assert main(["epsilon", *OPTIONS[:2], "--sample-rate", "2", *OPTIONS[4:], "--steps", "9"]) == 1
    assert "must lie in (0, 1]" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["steps", *OPTIONS])


def said(capsys, *arguments):
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_cost_of_a_plan(capsys):
    """The table of reference values, of other accountants, and the calibration's numbers."""
    epsilon = said(capsys, "epsilon", *OPTIONS, "--steps", "10000")["epsilon"]
    assert epsilon == pytest.approx(6.188, abs=2e-3)
    replaced = ["--steps", "10000", "--neighboring", "replace_one"]
    epsilon = said(capsys, "epsilon", *OPTIONS, *replaced)["epsilon"]
    assert epsilon == pytest.approx(10.881, rel=1e-3)
    found = said(capsys, "compare", *OPTIONS, "--steps", "10000")
    assert found["gdp_lower_bound"] == pytest.approx(6.007, abs=1e-3)
    assert found["gdp_lower_bound"] < found["pld"] < found["rdp"] < found["replace_one"]
    assert found["rdp"] == pytest.approx(6.713, abs=1e-3)
    steps = said(capsys, "steps", *OPTIONS, "--epsilon", "3")["steps"]
    assert steps == PrivacyAccountant(3.0, DELTA).remaining(STEP)
    goal = ["--epsilon", "3", "--delta", "1e-5", "--sample-rate", ".01", "--steps", str(steps)]
    assert said(capsys, "noise", *goal)["noise_multiplier"] == pytest.approx(1.0, rel=1e-3)
    assert main(["compare", *OPTIONS, "--steps", "100"]) == 0
    assert "Renyi curves " in capsys.readouterr().out
    full = ["--noise-multiplier", "1", "--sample-rate", "1", "--delta", "1e-5", "--steps", "4"]
    exact = PrivacyAccountant().compose(GaussianDpEvent(0.5)).get_epsilon(DELTA)
    assert said(capsys, "compare", *full)["gdp_lower_bound"] == pytest.approx(exact)


def test_a_command_ends_quietly_if_its_reader_has_enough():
    """As ``head`` has."""
    plan = "--noise-multiplier 1 --sample-rate 1 --steps 1 --delta 1e-5"
    command = [sys.executable, "-m", "torch_dpbayes.accounting", "epsilon", *plan.split()]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert done.returncode == 1 and done.stderr == b""
