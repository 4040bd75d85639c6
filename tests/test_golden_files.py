"""Files that an earlier version wrote are read, and what it computed is so still.

scripts/benchmarks/write_golden_files.py wrote tests/golden/.
"""

import base64
import json
import pickle
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from write_golden_files import (
    DELTA,
    EVENTS,
    STEP,
    ledger_values,
    network,
    noise_of_the_generator_alone,
    prices,
    private_run,
    public_values,
    records,
)

import torch_dpbayes as dpb
from torch_dpbayes import noise
from torch_dpbayes.accounting import PrivacyAccountant
from torch_dpbayes.batches.draws import PoissonSampler
from torch_dpbayes.batches.other_laws import (
    FixedSizeSampler,
    RandomAllocationSampler,
    TruncatedPoissonSampler,
)

GOLDEN = Path(__file__).with_name("golden")
VALUES = json.loads((GOLDEN / "values.json").read_text())


@pytest.fixture
def ledger(tmp_path):
    return Path(shutil.copy(GOLDEN / "ledger.db", tmp_path))


def test_each_kind_of_event_costs_what_it_did():
    assert prices() == [
        {**old, "epsilon": old["epsilon"] and pytest.approx(old["epsilon"], rel=1e-9)}
        for old in VALUES["prices"]
    ]


def test_the_ledger_says_what_it_did(ledger):
    old = VALUES["ledger"]
    new = ledger_values(ledger)
    assert new == {**old, "epsilon": pytest.approx(old["epsilon"], rel=1e-9)}


def test_a_job_goes_on_in_the_ledger(ledger):
    old = VALUES["ledger"]
    accountant = PrivacyAccountant(4.0, DELTA, path=ledger)
    accountant.compose(STEP)
    assert len(accountant) == old["releases"] + 1
    assert accountant.remaining(STEP) == old["remaining"] - 1


def test_a_run_goes_on_from_the_checkpoint_as_it_did():
    saved = torch.load(GOLDEN / "checkpoint.pt", weights_only=True)
    net, accountant = network(), PrivacyAccountant(5.0, DELTA)
    net.load_state_dict(saved["model"])
    optimizer, train = private_run(net, accountant)
    optimizer.load_state_dict(saved["optimizer"])
    with noise_of_the_generator_alone():
        train()
    old = VALUES["checkpoint"]
    assert accountant.get_epsilon(DELTA) == pytest.approx(old["epsilon"], rel=1e-9)
    for name, p in net.named_parameters():
        expected = torch.tensor(old["parameters"][name])
        torch.testing.assert_close(p.detach(), expected, rtol=1e-6, atol=1e-6)


OLD_DRAWS = torch.load(GOLDEN / "draws_without_darts.pt", weights_only=True)
KINDS = {
    "poisson": PoissonSampler,
    "truncated_poisson": partial(TruncatedPoissonSampler, max_batch_size=4),
    "fixed_size": FixedSizeSampler,
    "random_allocation": RandomAllocationSampler,
}


@pytest.mark.parametrize("law", KINDS)
def test_draws_that_began_with_a_number_for_every_record_go_on_so(law):
    """Five of a hundred records. The file was written before there were darts; two draws waited."""
    old, kind = OLD_DRAWS[law], KINDS[law]
    position = old["position"]
    for saved in (0, 3):  # also from a position that was saved again on the way
        noise._used_positions.clear()
        sampler = kind(100, 0.05, torch.Generator(), 0)
        sampler.require_position(position)
        sampler.resume(position)
        found = []
        while len(found) < 6 - saved:
            for batch in sampler:
                sampler.delivered()
                sampler.use()
                sampler.retire()
                found.append(batch)
                if len(found) == 3:
                    position = sampler.position()
                if len(found) == 6 - saved:
                    break
        assert found == old["draws"][saved:]


@pytest.mark.parametrize("law", KINDS)
@pytest.mark.parametrize("num_data", [50, 99, 101, 150, 200, 1000])
def test_draws_that_waited_do_not_take_the_random_numbers_of_later_ones(law, num_data):
    """They would, of other data than they were drawn from, which the old file does not name."""
    position = OLD_DRAWS[law]["position"]
    with pytest.raises(ValueError, match="keep data and batch size, or leave out generator="):
        KINDS[law](num_data, 0.05, torch.Generator(), 0).require_position(position)
    if law != "random_allocation":
        KINDS[law](num_data, 0.05, torch.Generator(), 0).require_position(position[-1:])


def test_samples_predict_what_they_did():
    samples, old = dpb.PosteriorSamples.load(GOLDEN / "samples.pt"), VALUES["samples"]
    assert len(samples) == old["length"]
    found = samples.predict(network().eval(), records()[0], transform=lambda u: F.softmax(u, -1))
    torch.testing.assert_close(found, torch.tensor(old["prediction"]), rtol=1e-6, atol=1e-6)


def test_every_public_value_is_unpickled():
    new, old = public_values(), VALUES["pickles"]
    assert new.keys() == old.keys() and len(new) > len(EVENTS)
    for name, value in new.items():
        loaded = pickle.loads(base64.b64decode(old[name]))
        assert type(loaded) is type(value) and repr(loaded) == repr(value)
        assert isinstance(value, Exception) or loaded == value
