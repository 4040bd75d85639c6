"""Files that an earlier version wrote are read, and what it computed is so still.

scripts/benchmarks/write_golden_files.py wrote tests/golden/.
"""

import base64
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import write_golden_files as golden
from torch.nn import functional as F

import torch_dpbayes as dpb
from torch_dpbayes.accounting import PrivacyAccountant

GOLDEN = Path(__file__).with_name("golden")
VALUES = json.loads((GOLDEN / "values.json").read_text())


def test_each_kind_of_event_costs_what_it_did():
    assert golden.prices() == [
        {**old, "epsilon": old["epsilon"] and pytest.approx(old["epsilon"], rel=1e-9)}
        for old in VALUES["prices"]
    ]


def test_the_ledger_says_what_it_did_and_a_job_goes_on_in_it(tmp_path):
    path, old = Path(shutil.copy(GOLDEN / "ledger.db", tmp_path)), VALUES["ledger"]
    new = golden.ledger_values(path)
    assert new == {**old, "epsilon": pytest.approx(old["epsilon"], rel=1e-9)}
    accountant = PrivacyAccountant(4.0, golden.DELTA, path=path)
    accountant.compose(golden.STEP)
    assert len(accountant) == old["releases"] + 1
    assert accountant.remaining(golden.STEP) == old["remaining"] - 1


def test_a_run_goes_on_from_the_checkpoint_as_it_did():
    saved = torch.load(GOLDEN / "checkpoint.pt", weights_only=True)
    net, accountant = golden.network(), PrivacyAccountant(5.0, golden.DELTA)
    net.load_state_dict(saved["model"])
    optimizer, train = golden.private_run(net, accountant)
    optimizer.load_state_dict(saved["optimizer"])
    with golden.noise_of_the_generator_alone():
        train()
    old = VALUES["checkpoint"]
    assert accountant.get_epsilon(golden.DELTA) == pytest.approx(old["epsilon"], rel=1e-9)
    for name, p in net.named_parameters():
        expected = torch.tensor(old["parameters"][name])
        torch.testing.assert_close(p.detach(), expected, rtol=1e-6, atol=1e-6)


def test_samples_predict_what_they_did():
    samples, old = dpb.PosteriorSamples.load(GOLDEN / "samples.pt"), VALUES["samples"]
    assert len(samples) == old["length"]
    found = samples.predict(
        golden.network().eval(), golden.records()[0], transform=lambda u: F.softmax(u, -1)
    )
    torch.testing.assert_close(found, torch.tensor(old["prediction"]), rtol=1e-6, atol=1e-6)


def test_every_public_value_is_unpickled():
    new, old = golden.public_values(), VALUES["pickles"]
    assert new.keys() == old.keys() and len(new) > len(golden.EVENTS)
    for name, value in new.items():
        loaded = pickle.loads(base64.b64decode(old[name]))
        assert type(loaded) is type(value) and repr(loaded) == repr(value)
        assert isinstance(value, Exception) or loaded == value
