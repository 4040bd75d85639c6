"""Branches that made-up records do not bring about: a value, a number of records, a coincidence."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.checks.decisions import Constants, Decisions

pytestmark = pytest.mark.usefixtures("whole_batches")

MODES = pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
FAR = math.exp(30)  # no constant of the code that uses it
LIMIT = 54321


class Net(nn.Module):
    """``change(h, x)`` is done between two layers."""

    def __init__(self, change, activation=torch.tanh):
        super().__init__()
        self.a, self.b, self.change = nn.Linear(4, 8), nn.Linear(8, 2), change
        self.activation = activation

    def forward(self, x):
        return self.b(self.activation(self.change(self.a(x), x)))


def make_private(net, mode="hooks", batch_size=40, x=None):
    x = torch.zeros(200, 4) if x is None else x
    dpb.PrivacyEngine().make_private(
        module=net,
        optimizer=partial(dpb.optim.DPSGLD, lr=0.1),
        data_loader=DataLoader(TensorDataset(x, torch.zeros(len(x))), batch_size=batch_size),
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )


def centred(h):
    return h - h.mean(0)


def far(x):
    return x.abs().amax() > math.exp(30) if len(x) else torch.tensor(False)


class CentredBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, g):
        return g - g.mean(0) if g.norm() > math.exp(33) else g


def halved_until_small(h, x):
    while far(h):
        h = h / 2
    return h


def cut(h):
    return h.clamp(-3, 3)


def in_place(h, x):
    is_large = (h.abs() > 3).any()
    is_large &= (h.abs() < math.exp(30)).all()
    return cut(h) if is_large else h


class Counted(nn.Module):
    """Its limit is a buffer."""

    def __init__(self, by):
        super().__init__()
        self.by = by
        self.register_buffer("limit", torch.tensor(54321.0))

    def forward(self, h, x):
        return self.by(h, x, self.limit)


def far_and_negative(h, x):
    return centred(h) if far(x) and (x[:, 0] < -math.exp(30)).any() else h


# -- decisions that one record can turn for others -------------------------------------------------

# by a constant of the code, as a value or as a number of records
CONSTANTS = {
    "how many are beyond a buffer": Counted(lambda h, x, limit: h / (1 + (x[:, 0] > limit).sum())),
    "divided by what is beyond a buffer": Counted(
        lambda h, x, limit: h * limit / torch.cat([x.abs().flatten(), limit[None]]).amax()
    ),
    "a huge value": lambda h, x: centred(h) if x.abs().amax() > 1e5 else h,
    "a certain value": lambda h, x: centred(h) if (x == 77).any() else h,
    "a certain value, found by torch.where": lambda h, x: torch.where(
        (x == 77.5).any(), centred(h), h
    ),
    "the record with a certain value": lambda h, x: (
        h - h[(x == 77).any(1)][0] if (x == 77).any() else h
    ),
    "a value in a list": lambda h, x: centred(h) if 77 in x else h,
    "some found": lambda h, x: centred(h) if len((x == 77).nonzero()) else h,
    "two conditions": lambda h, x: (
        centred(h) if (x == 77).any() and (x.amin(1) < -(999.5**2)).any() else h
    ),
    "a global": lambda h, x: h / 2 if len(x) > 1 and x.amax() > LIMIT else h,
    "rescaled": lambda h, x: h / 255 if x.abs().amax() > 1e5 else h,
    "divided by the largest": lambda h, x: h / max(1.0, x.abs().amax().item() / 1e4),
    "more than 40 records": lambda h, x: centred(h) if len(h) > 40 else h,
    "100 records": lambda h, x: centred(h) if len(h) == 100 else h,
    "half as large again as batches are": lambda h, x: centred(h) if len(h) > 20 * math.e else h,
}
# that no made-up record brings about
COINCIDENCES = {
    "how many have a certain value": lambda h, x: centred(h) if (x == 77).sum() == 1 else h,
    "as many, found by torch.where": lambda h, x: torch.where((x == 77).sum() == 1, h - h[:1], h),
    "as many, as a factor": lambda h, x: h * (1 + ((x == 77).sum() == 1)),
    "as many, as a mask": lambda h, x: h.masked_fill(((x == 77).sum() == 1).expand(len(h), 1), 0),
    "torch.equal": lambda h, x: centred(h) if torch.equal(x.exp(), x.cos()) else h,
    "torch.allclose": lambda h, x: centred(h) if torch.allclose(x.exp(), x.cos()) else h,
    "by how much a sum is beyond a bound": lambda h, x: (
        h * (1 + max(0.0, x.sum().item() - math.exp(30)))
    ),
    "a sum of values of both signs": lambda h, x: h * (1 + (x[:, 1].sum().item() > math.exp(30))),
    "a loop": halved_until_small,
    "rescaled if far away": lambda h, x: h / 255 if far(x) else h,
    "not rescaled unless far away": lambda h, x: h if not far(x) else h / 255,
    "one in another": far_and_negative,
    "slightly": lambda h, x: h * (1 + 3e-3 * far(x)),
    "in the backward pass": lambda h, x: CentredBackward.apply(h),
    "an exact number": lambda h, x: h / 2 if len(x) and int(x.amax()) == 777 else h,
    "a number of Python's": lambda h, x: (
        centred(h) if len(x) and x.amax().item() > math.exp(30) else h
    ),
    "numbers of Python's": lambda h, x: (
        centred(h) if any(math.exp(30) < v < math.inf for v in x.flatten().tolist()) else h
    ),
    "a sum of numbers": lambda h, x: h / (1 + int((x == math.exp(30)).sum())),
}


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("name", CONSTANTS)
def test_a_branch_at_a_constant_of_the_code_is_refused(name):
    with pytest.raises(ValueError, match=r"depend on (another|the number)|changes other records"):
        make_private(Net(CONSTANTS[name]))


CUTS = {
    # the largest of numbers one of which is none is none
    "the largest is large": lambda h, x: cut(h) if len(h) and h.abs().max() > 3 else h,
    "the largest is very large": lambda h, x: (
        h.clamp(-50, 50) if len(h) and h.abs().max() > 50 else h
    ),
    "the largest is large and a number": lambda h, x: (
        cut(h) if len(h) and 3 < h.abs().max().item() < math.inf else h
    ),
    "any is large and none too large": lambda h, x: (
        cut(h) if (h.abs() > 3).any() & ~(h.abs() > math.exp(30)).any() else h
    ),
    "the same, in place": in_place,
}


@MODES
@pytest.mark.first_cases(2)
@pytest.mark.parametrize("name", CUTS)
def test_a_cut_that_one_record_can_prevent_is_refused(name, mode):
    with pytest.raises(ValueError, match=r"depend on another|changes other records"):
        make_private(Net(CUTS[name], torch.nn.Identity()), mode)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("name", COINCIDENCES)
def test_a_branch_that_no_made_up_record_takes_is_refused(name):
    with pytest.raises(ValueError, match=r"depend on another|changes other records"):
        make_private(Net(COINCIDENCES[name]))


@pytest.mark.first_cases(1)
@MODES
def test_the_error_names_the_line_and_what_to_write(mode):
    def change(h, x):
        if (x == 77).sum() == 1:  # this line
            h = h / 2
        return h

    with pytest.raises(
        ValueError, match=r"test_decision_checks.py:\d+ \(if .* # this line\).*where"
    ):
        make_private(Net(change), mode)


class LargeBatches(nn.Module):
    """Mixes in batches of more records than an attribute says."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.large = nn.Linear(4, 8), nn.Linear(8, 2), 300

    def forward(self, x):
        h = self.a(x)
        return self.b(torch.tanh(centred(h) if len(h) > self.large else h))


def test_an_attribute_is_a_constant_too():
    with pytest.raises(ValueError, match="depend on the number of records"):
        make_private(LargeBatches())


def test_codes_of_integers():
    class Coded(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.b = nn.Embedding(50, 6), nn.Linear(6, 2)

        def forward(self, x):
            h = self.table(x).mean(1)
            return self.b(centred(h) if (x == 37).sum(1).eq(5).any() else h)

    with pytest.raises(ValueError, match=r"depend on another|changes other"):
        make_private(Coded(), x=torch.zeros(40, 5, dtype=torch.long))


# -- decisions that concern each record, or none ---------------------------------------------------


class Experts(nn.Module):
    """Frozen, each on the records that choose it, if there are any."""

    def __init__(self, fails_on_none):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)).requires_grad_(False)
        self.fails_on_none = fails_on_none

    def forward(self, h, x):
        choice, y = x[:, :3].argmax(1), h.clone()
        for k, expert in enumerate(self.experts):
            chosen = choice == k
            if chosen.any():
                part = h[chosen]
                assert len(part) or not self.fails_on_none
                y = y.index_put((chosen,), expert(part))
        return y


def record_by_record(h, x):
    return (
        torch.stack([2 * row if x[k, 0] > 0 else row for k, row in enumerate(h)]) if len(h) else h
    )


def lengths_one_by_one(h, x):
    rows = []
    for k, row in enumerate(h):
        n = int((x[k] > 0).sum())
        rows.append(torch.cat([row[:n], 0 * row[n:]]))
    return torch.stack(rows) if rows else h


def weights_from_a_list(h, x):
    return h * torch.tensor([1.0 if v > 0 else 2.0 for v in x[:, 0].tolist()]).reshape(-1, 1)


def trimmed(h, x):
    if not len(x):
        return h
    lengths = (x > 0).sum(1)
    n = max(1, int(lengths.max()))
    mask = torch.arange(n) < lengths[:, None]
    return h + (x[:, :n] * mask).sum(1, keepdim=True)


def raising(h, x):
    if x.abs().max() > 1e5:
        raise ValueError("too large")
    if len(x) > 1000:
        raise ValueError("too many")
    return h


def clamped(h, x):
    return h.clamp(-3, 3) if (h.abs() > 3).any() else h


HARMLESS = {
    "experts": Experts(False),
    "experts that fail on no records": Experts(True),
    "record by record": record_by_record,
    "lengths one by one": lengths_one_by_one,
    "weights from a list": weights_from_a_list,
    "padding trimmed and masked": trimmed,
    "raising": raising,
    "missing values": lambda h, x: torch.where(h.isnan(), 0.0, h) if h.isnan().any() else h,
    "cut if any is large": clamped,
    "a faster way if none is masked": lambda h, x: (
        h if (x > 0).all() else h * (x > 0).any(1, keepdim=True)
    ),
    "a coin": lambda h, x: h if torch.rand(()) < 0.5 else 2 * h,
    "a condition of each record": lambda h, x: torch.where(x[:, :1] > 1e5, 0 * h, h),
    "a parameter decides": lambda h, x: h * 2 if FAR > 1 and torch.ones(3).sum() > 2 else h,
    "no records": lambda h, x: h * 2 if len(h) else h,
}


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("name", HARMLESS)
def test_what_decides_on_each_record_alone_passes(name):
    make_private(Net(HARMLESS[name]))


def test_a_decision_on_parameters_is_none_on_records():
    class Scaled(Net):
        def forward(self, x):
            h = self.a(x)
            return self.b(h / 2 if self.a.weight.norm() > 0.1 else h)

    make_private(Scaled(None))


# -- how it is seen --------------------------------------------------------------------------------


def test_decisions_are_noted_where_they_depend_on_the_batch_and_forced_where_they_are_taken():
    x, other = torch.tensor([1.0, 5.0]), torch.tensor([1.0, 5.0])
    seen = Decisions({})
    seen.watch([x])
    with seen:
        assert (x * 2 > 3).any()
        assert (other * 2 > 3).any()
        assert torch.zeros_like(x).sum() == 0
        largest = x.max().item()
    (decision, values), (number, numbers) = seen.outcomes.items()
    assert values == [True] and not decision.is_number
    assert numbers == [5.0] == [largest] and number.is_number

    def run():
        results = []
        for _ in range(3):
            results.append(bool((x > 3).any()))
        return results

    seen.start()
    with seen:
        assert run() == [True] * 3
    (place,) = seen.outcomes
    assert f":{run.__code__.co_firstlineno + 3} (results.append" in str(place)
    with Decisions({place: False}):
        assert run() == [False] * 3
    with Decisions({place: False}, call=1):
        assert run() == [True, False, True]


def test_constants_are_those_of_the_code_that_runs_and_of_what_it_names():
    constants, threshold = Constants(), 41.5

    def used(x):
        return x > threshold or x in (12, 13) or x == LIMIT

    def unused(x):
        return x > 99

    with constants.collected():
        used(3)
    assert {12, 13, 41.5, LIMIT} <= set(constants.numbers) and 99 not in constants.numbers
    assert {12, 13, 14, 41, 42} <= set(constants.sizes)
