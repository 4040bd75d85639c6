"""What the front door refuses: tables of arguments and of runs, with the code of the error."""

import copy
from collections import OrderedDict
from functools import partial

import opacus
import pytest
import torch
from opacus.optimizers import DPOptimizer
from support import steps
from support.refusals import refused
from torch import nn
from torch.utils.data import (
    ChainDataset,
    DataLoader,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import torch_dpbayes as dpb
from torch_dpbayes.accounting.events import GaussianDpEvent

DATA = TensorDataset(torch.randn(60, 4), torch.arange(60) % 3)
NET = nn.Linear(4, 3)
SGLD = partial(dpb.optim.DPSGLD, lr=0.1)
TARGET = {"target_epsilon": 1.0, "target_delta": 1e-5, "epochs": 1}
SHARE = {**TARGET, "target_epsilon": None, "additional_epsilon": 1.0}


def loader(data=DATA, **options):
    return {"data_loader": DataLoader(data, **{"batch_size": 12, **options})}


def of_users(**options):
    ids = [i // 2 for i in range(60)]
    return {"accountant": dpb.PrivacyAccountant(unit="user"), "user_ids": ids, **options}


def built(**options):
    """A built optimizer, whose values hold."""
    own = {"num_data": 60, "expected_batch_size": 12, "max_grad_norm": 1.0, "noise_multiplier": 0.3}
    made = dpb.optim.DPSGLD(NET.named_parameters(), 0.1, sampling="poisson", **own | options)
    return {"optimizer": made, "max_grad_norm": None}


def factory(**own):
    """One that does not make what it is called for."""
    return {"optimizer": lambda params, **given: dpb.optim.DPSGLD(params, 0.1, **given | own)}


def same_numbers(is_same):
    """Noise and draws from one generator, or from two that give the same numbers."""
    noise = torch.Generator().manual_seed(seed := torch.seed() % 2**31)
    draws = noise if is_same else torch.Generator().manual_seed(seed)
    return {"optimizer": partial(SGLD, generator=noise), **loader(generator=draws)}


def normed(layer):
    return nn.Sequential(layer, nn.Linear(4, 3))


def frozen_norm():
    return normed(nn.BatchNorm1d(4).requires_grad_(False))


class Skipping(nn.Linear):
    """Left out for some records."""

    def forward(self, x):
        return x if x.sum() < 2 else super().forward(x)


PLAIN = torch.optim.SGD(NET.parameters(), 0.3)
OPACUS = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": 10}
HELD = dpb.PrivacyAccountant(3.0, 1e-5).compose(GaussianDpEvent(9.0), adaptive=True)
REFUSED = {
    "loader-iterable": [loader(ChainDataset([DATA]))],
    "loader-sampler": [
        {"data_loader": DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]])},
        loader(batch_size=None),
        loader(sampler=WeightedRandomSampler([1.0] * 60, 60)),
        loader(sampler=RandomSampler(DATA, replacement=True)),
        loader(sampler=RandomSampler(DATA, num_samples=10)),
    ],
    "loader-repeats": [loader(Subset(DATA, [*range(20), 0]))],
    "loader-collate": [loader([{"x": torch.zeros(4), "name": "Ann"} for _ in range(20)])],
    "loader-generator": [same_numbers(True), same_numbers(False)],
    "optimizer-not-private": [
        {"optimizer": PLAIN},
        {"optimizer": lambda parameters, **_: PLAIN},
        {"optimizer": DPOptimizer(PLAIN, **OPACUS)},
        {"optimizer": "sgld"},
    ],
    "optimizer-settings": [
        {"optimizer": partial(SGLD, max_grad_norm=2.0)},
        {"optimizer": partial(SGLD, num_data=7)},
        {"optimizer": partial(SGLD, accountant=dpb.PrivacyAccountant())},
        factory(num_data=60_000),
        factory(accountant=dpb.PrivacyAccountant()),
        {**factory(noise_multiplier=0.0), "noise_multiplier": 5.0},
        built(max_grad_norm=0.7) | {"max_grad_norm": 1.0},
        {**built(), "noise_multiplier": 2.0},
        {**built(), "accountant": dpb.PrivacyAccountant()},
        {**built(), **loader(batch_size=6)},
        {**built(), **loader(Subset(DATA, range(59)))},
        {**TARGET, **built(noise_multiplier=0.1)},
    ],
    "optimizer-parameters": [
        {"optimizer": lambda _, **options: SGLD([NET.weight], **options)},
        {"optimizer": lambda _, **options: SGLD(nn.Linear(4, 3).parameters(), **options)},
    ],
    "model-eval": [{"module": nn.Linear(4, 3).eval()}, {"module": frozen_norm().eval()}],
    "model-layer": [{"module": frozen_norm()}],
    "model-map": [{"module": normed(Skipping(4, 4))}],
    "model-wrapped": [{"module": opacus.GradSampleModule(nn.Linear(4, 3))}],
    "model-vouch": [{"grad_sample_mode": "hooks"}],
    "argument": [
        {"module": nn.Linear(4, 3).requires_grad_(False)},
        loader(batch_size=61),
        {"grad_sample_mode": "ghost"},
        {"loss_reduction": "none"},
        {"sampling": "shuffle"},
        {"sampling": "fixed_size", "max_batch_size": 5},
        {"max_batch_size": 3},
        of_users(accountant=dpb.PrivacyAccountant()),
        {"accountant": dpb.PrivacyAccountant(unit="user")},
        of_users(sampling="fixed_size"),
        of_users(max_batch_size=50),
        of_users(records_per_user=0),
        of_users(**loader(batch_size=31)),
        {"records_per_user": 2},
        {**TARGET, "epochs": 0},
        {**TARGET, "target_epsilon": -1.0},
        {**TARGET, "target_delta": 1.5},
        {**TARGET, "additional_epsilon": 1.0},
        {**SHARE, "additional_epsilon": -1.0},
        {**TARGET, "calibrate": 0.0},
        {**TARGET, "calibrate": 1.0},
        {**TARGET, **of_users(calibrate=0.1)},
        {**TARGET, "noise_multiplier": 8.0},  # of a plan
    ],
    "argument-type": [
        {"data_loader": [(torch.zeros(4), 0)]},
        {"loss": 3},
        {"assume_independent_records": "False"},
        {"temperature": 1.0},
        {**TARGET, "target_epsilon": None},
        {**TARGET, "data_loader": None},
        {**TARGET, "no_such_option": 1.0},
    ],
    "budget-target": [
        {**TARGET, "accountant": dpb.PrivacyAccountant(0.5, 1e-5)},
        {**TARGET, "accountant": dpb.PrivacyAccountant(1.0, 1e-6)},
    ],
    "budget-whole": [{**TARGET, "accountant": HELD}, {**SHARE, "accountant": HELD}],
    "budget-delta": [{"epochs": 1}],  # of a plan
}


@pytest.mark.parametrize(
    ("code", "options"), [(code, options) for code, rows in REFUSED.items() for options in rows]
)
def test_arguments(code, options):
    options = {"module": NET, "optimizer": SGLD, "max_grad_norm": 1.0, **loader(), **options}
    engine = dpb.PrivacyEngine(options.pop("accountant", None))
    make = engine.make_private_with_epsilon if "target_delta" in options else engine.make_private
    if "epochs" in options and ("noise_multiplier" in options or "target_delta" not in options):
        make = engine.plan
    with refused(code):
        make(**options)


def test_accountants(tmp_path):
    """A ledger takes no seeded draws: two runs of 1000 steps at q = .01 and z = 1 with the same
    batches cost epsilon = 4.5, and 2.6 if draws are independent.
    """
    for accountant in ("rdp", opacus.accountants.RDPAccountant()):
        with refused("argument-type"):
            dpb.PrivacyEngine(accountant)
    budget = dpb.PrivacyAccountant(0.5, 1e-5)  # which a factory may have, too
    made(accountant=budget, optimizer=partial(SGLD, accountant=budget))
    ledger = dpb.PrivacyAccountant(3.0, 1e-5, path=tmp_path / "budget.db")
    with refused("loader-generator"):
        made(accountant=ledger, **loader(generator=torch.Generator()))
    assert len(ledger) == 0


# -- loops -----------------------------------------------------------------------------------------


def made(net=None, **options):
    engine = dpb.PrivacyEngine(options.pop("accountant", None))
    given = {"optimizer": SGLD, "max_grad_norm": 1.0, "noise_multiplier": 4.0, **loader()}
    net = nn.Linear(4, 3) if net is None else net
    return engine, *engine.make_private(module=net, **{**given, **options})


def test_a_loop_that_leaves_training_mode_or_a_layer_s_evaluation():
    frozen = nn.BatchNorm1d(4).requires_grad_(False).eval()
    for of, code in ((None, "step-eval"), (normed(frozen), "model-layer")):
        _, net, optimizer, private = made(of)
        batches = iter(private)
        steps.one(net, optimizer, next(batches))
        net.train(code == "model-layer")
        with refused(code):
            steps.one(net, optimizer, next(batches))
        assert len(optimizer.accountant) == 1


# -- checkpoints -----------------------------------------------------------------------------------


def test_a_resumed_run_predicts_and_saves_before_its_first_batch(tmp_path):
    """With the frozen numbers that the file has."""
    path, samples = tmp_path / "run.pt", dpb.PosteriorSamples(burn_in=0)
    for is_resumed in (False, True):
        net = nn.Linear(4, 3)
        net.bias.requires_grad_(False).normal_()
        engine, net, optimizer, private = made(net)
        if is_resumed:
            engine.load_checkpoint(path, module=net, optimizer=optimizer)
            engine.save_checkpoint(path, module=net, optimizer=optimizer)
            samples.predict(net, torch.randn(3, 4))
        steps.train(net, optimizer, private, 2)
        samples.collect(net)
        engine.save_checkpoint(path, module=net, optimizer=optimizer)


def named(name="layer", buffer=None):
    """One layer; two of them have the same trainable parameters whatever else they have."""
    net = nn.Sequential(OrderedDict({name: nn.Linear(4, 3)}))
    if buffer is not None:
        net.register_buffer("scale", torch.ones(buffer))
    return net


OTHERS = [named("head"), named(), named(buffer=3), {}, "no checkpoint"]


@pytest.mark.parametrize(
    ("own", "other"), [*((named(buffer=2), other) for other in OTHERS), (named(), named(buffer=2))]
)
def test_another_network_is_refused_before_charges_are_taken_over(tmp_path, own, other):
    """Or what is no checkpoint."""
    path = tmp_path / "run.pt"
    engine, net, optimizer, _ = made(own)
    before = copy.deepcopy(net.state_dict())
    if isinstance(other, nn.Module):
        of_other, other, its_optimizer, private = made(other)
        steps.train(other, its_optimizer, private, 2)
        of_other.save_checkpoint(path, module=other, optimizer=its_optimizer)
    elif isinstance(other, str):
        path.write_text(other)
    else:
        torch.save(other, path)
    with refused("checkpoint"):
        engine.load_checkpoint(path, module=net, optimizer=optimizer)
    with refused("optimizer-not-private"):
        engine.load_checkpoint(path, module=net, optimizer=None)
    assert len(engine.accountant) == 0
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
