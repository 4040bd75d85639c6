"""What the front door refuses: tables of arguments and of runs, with the code of the error."""

from functools import partial

import opacus
import pytest
import torch
from opacus.optimizers import DPOptimizer
from support import steps
from support.refusals import refused
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import torch_dpbayes as dpb
from torch_dpbayes.accounting.events import GaussianDpEvent

DATA = TensorDataset(torch.randn(60, 4), torch.arange(60) % 3)
NET = nn.Linear(4, 3)
IDS = [i // 2 for i in range(60)]
SGLD = partial(dpb.optim.DPSGLD, lr=0.1)
GIVEN = {"num_data": 60, "expected_batch_size": 12, "max_grad_norm": 1.0, "noise_multiplier": 0.3}
TARGET = {"target_epsilon": 1.0, "target_delta": 1e-5, "epochs": 1}
SHARE = {**TARGET, "target_epsilon": None, "additional_epsilon": 1.0}


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(4), 0


def of_users(**options):
    return {"accountant": dpb.PrivacyAccountant(unit="user"), "user_ids": IDS, **options}


def loader(data=DATA, **options):
    return {"data_loader": DataLoader(data, **{"batch_size": 12, **options})}


def built(max_grad_norm=None, **options):
    """A built optimizer, whose values hold."""
    own = {**GIVEN, "sampling": "poisson", **options}
    return {
        "optimizer": dpb.optim.DPSGLD(NET.named_parameters(), 0.1, **own),
        "max_grad_norm": max_grad_norm,
    }


def elsewhere(params, **_):
    return dpb.optim.DPSGLD(params, 0.1, **{**GIVEN, "num_data": 60_000}, sampling="poisson")


def on_its_own_accountant(params, **options):
    return dpb.optim.DPSGLD(params, 0.1, **{**options, "accountant": dpb.PrivacyAccountant()})


def without_floor(params, **options):
    return dpb.optim.DPSGLD(params, 0.1, **{**options, "noise_multiplier": 0.0})


def held():
    accountant = dpb.PrivacyAccountant(3.0, 1e-5)
    return accountant.compose(GaussianDpEvent(9.0), adaptive=True)


def generators():
    """Two that give the same numbers."""
    first, second = (torch.Generator().manual_seed(torch.seed() % 2**31) for _ in range(2))
    second.set_state(first.get_state())
    return first, second


def same_numbers(noise, draws):
    return {"optimizer": partial(SGLD, generator=noise), **loader(generator=draws)}


def normed(layer):
    return nn.Sequential(layer, nn.Linear(4, 3))


class Skipping(nn.Module):
    """Leaves its layer out by chance."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x):
        return x if torch.rand(()) < 2 else self.body(x)


NOT_PRIVATE = [
    torch.optim.SGD(NET.parameters(), 0.3),
    lambda parameters, **_: torch.optim.SGD([p for _, p in parameters], 0.3),
    DPOptimizer(
        torch.optim.SGD(NET.parameters(), 0.5),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=10,
    ),
    "sgld",
]

REFUSED = [
    # loaders
    ("loader-iterable", loader(Stream())),
    ("loader-sampler", {"data_loader": DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]])}),
    ("loader-sampler", loader(batch_size=None)),
    ("loader-sampler", loader(sampler=WeightedRandomSampler([1.0] * 60, 60))),
    ("loader-sampler", loader(sampler=RandomSampler(DATA, replacement=True))),
    ("loader-sampler", loader(sampler=RandomSampler(DATA, num_samples=10))),
    ("loader-repeats", loader(Subset(DATA, [*range(20), 0]))),
    ("loader-collate", loader([{"x": torch.zeros(4), "name": "Ann"} for _ in range(20)])),
    ("argument", loader(batch_size=61)),
    ("argument-type", {"data_loader": [(torch.zeros(4), 0)]}),
    ("loader-generator", same_numbers(*generators())),
    ("loader-generator", same_numbers(*generators()[:1] * 2)),
    # optimizers
    *(("optimizer-not-private", {"optimizer": optimizer}) for optimizer in NOT_PRIVATE),
    ("optimizer-settings", {"optimizer": partial(SGLD, max_grad_norm=2.0)}),
    ("optimizer-settings", {"optimizer": partial(SGLD, num_data=7)}),
    ("optimizer-settings", {"optimizer": partial(SGLD, accountant=dpb.PrivacyAccountant())}),
    ("optimizer-settings", {"optimizer": elsewhere}),
    ("optimizer-settings", {"optimizer": on_its_own_accountant}),
    ("optimizer-settings", {"optimizer": without_floor, "noise_multiplier": 5.0}),
    ("optimizer-settings", built(max_grad_norm=0.7)),
    ("optimizer-settings", {**built(), "noise_multiplier": 2.0}),
    ("optimizer-settings", {**built(), "accountant": dpb.PrivacyAccountant()}),
    ("optimizer-settings", {**built(), **loader(batch_size=6)}),
    ("optimizer-settings", {**built(), **loader(Subset(DATA, range(59)))}),
    ("optimizer-settings", {**TARGET, **built(noise_multiplier=0.1), "max_grad_norm": 1.0}),
    (
        "optimizer-parameters",
        {"optimizer": lambda p, **options: dpb.optim.DPSGLD([NET.weight], 0.1, **options)},
    ),
    (
        "optimizer-parameters",
        {"optimizer": lambda p, **options: SGLD(nn.Linear(4, 3).parameters(), **options)},
    ),
    # models
    ("argument", {"module": nn.Linear(4, 3).requires_grad_(False)}),
    ("model-eval", {"module": nn.Linear(4, 3).eval()}),
    ("model-layer", {"module": normed(nn.BatchNorm1d(4).requires_grad_(False))}),
    ("model-eval", {"module": normed(nn.BatchNorm1d(4).requires_grad_(False)).eval()}),
    ("model-map", {"module": normed(Skipping())}),
    ("model-wrapped", {"module": opacus.GradSampleModule(nn.Linear(4, 3))}),
    # settings
    ("argument", {"grad_sample_mode": "ghost"}),
    ("model-vouch", {"grad_sample_mode": "hooks"}),
    ("argument", {"loss_reduction": "none"}),
    ("argument-type", {"loss": 3}),
    ("argument-type", {"assume_independent_records": "False"}),
    ("argument", {"sampling": "shuffle"}),
    ("argument", {"sampling": "fixed_size", "max_batch_size": 5}),
    ("argument", {"max_batch_size": 3}),
    # users
    ("argument", {"user_ids": IDS, "accountant": dpb.PrivacyAccountant()}),
    ("argument", {"accountant": dpb.PrivacyAccountant(unit="user")}),
    ("argument", of_users(sampling="fixed_size")),
    ("argument", of_users(max_batch_size=50)),
    ("argument", of_users(records_per_user=0)),
    ("argument", of_users(**loader(batch_size=31))),
    ("argument", {"records_per_user": 2}),
    # targets
    ("argument", {**TARGET, "epochs": 0}),
    ("argument", {**TARGET, "target_epsilon": -1.0}),
    ("argument", {**TARGET, "target_delta": 1.5}),
    ("argument", {**TARGET, "additional_epsilon": 1.0}),
    ("argument", {**SHARE, "additional_epsilon": -1.0}),
    ("argument-type", {**TARGET, "target_epsilon": None}),
    *(("argument", {**TARGET, "calibrate": share}) for share in (0.0, 1.0)),
    ("argument", {**TARGET, **of_users(calibrate=0.1)}),
    ("argument-type", {**TARGET, "data_loader": None}),
    ("argument-type", {"temperature": 1.0}),
    ("argument-type", {**TARGET, "no_such_option": 1.0}),
    ("budget-target", {**TARGET, "accountant": dpb.PrivacyAccountant(0.5, 1e-5)}),
    ("budget-target", {**TARGET, "accountant": dpb.PrivacyAccountant(1.0, 1e-6)}),
    ("budget-whole", {**TARGET, "accountant": held()}),
    ("budget-whole", {**SHARE, "accountant": held()}),
    # what a plan needs
    ("budget-delta", {"epochs": 1}),
    ("argument", {**TARGET, "noise_multiplier": 8.0}),
]


@pytest.mark.parametrize(("code", "options"), REFUSED)
def test_arguments(code, options):
    options = {"module": NET, "optimizer": SGLD, "max_grad_norm": 1.0, **loader(), **options}
    engine = dpb.PrivacyEngine(options.pop("accountant", None))
    make = engine.make_private_with_epsilon if "target_delta" in options else engine.make_private
    if "epochs" in options and ("noise_multiplier" in options or "target_delta" not in options):
        make = engine.plan
    with refused(code):
        make(**options)


def test_accountants():
    for accountant in ("rdp", opacus.accountants.RDPAccountant()):
        with refused("argument-type"):
            dpb.PrivacyEngine(accountant)
    budget = dpb.PrivacyAccountant(0.5, 1e-5)  # which a factory may have, too
    dpb.PrivacyEngine(budget).make_private(
        module=NET, optimizer=partial(SGLD, accountant=budget), max_grad_norm=1.0, **loader()
    )


def test_a_ledger_takes_no_seeded_draws(tmp_path):
    """Two runs of 1000 steps at q = .01 and z = 1 with the same batches cost epsilon = 4.5,
    and 2.6 if draws are independent.
    """
    engine = dpb.PrivacyEngine(dpb.PrivacyAccountant(3.0, 1e-5, path=tmp_path / "budget.db"))
    with refused("loader-generator"):
        engine.make_private(
            module=NET, optimizer=SGLD, max_grad_norm=1.0, **loader(generator=torch.Generator())
        )
    assert len(engine.accountant) == 0


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
        net.eval()
        with torch.no_grad():
            net(torch.randn(7, 4))
        if code == "model-layer":
            net.train()
        with refused(code):
            steps.one(net, optimizer, next(batches))
        assert len(optimizer.accountant) == 1


# -- checkpoints -----------------------------------------------------------------------------------


class Net(nn.Module):
    """One layer; two of them have the same trainable parameters whatever else they have."""

    def __init__(self, name="layer", buffer=None):
        super().__init__()
        self.add_module(name, nn.Linear(4, 3))
        self.name = name
        if buffer is not None:
            self.register_buffer("scale", torch.ones(buffer))

    def forward(self, x):
        return getattr(self, self.name)(x)


def test_a_resumed_run_predicts_and_saves_before_its_first_batch(tmp_path):
    """With the frozen numbers that the file has."""
    path, nets = tmp_path / "run.pt", [nn.Linear(4, 3) for _ in range(2)]
    for net in nets:
        net.bias.requires_grad_(False).normal_()
    samples = dpb.PosteriorSamples(burn_in=0)
    engine, net, optimizer, private = made(nets[0])
    steps.train(net, optimizer, private, 2)
    samples.collect(net)
    engine.save_checkpoint(path, module=net, optimizer=optimizer)
    engine, net, optimizer, private = made(nets[1])
    engine.load_checkpoint(path, module=net, optimizer=optimizer)
    engine.save_checkpoint(path, module=net, optimizer=optimizer)
    samples.predict(net, torch.randn(3, 4))
    steps.train(net, optimizer, private, 2)
    samples.collect(net)


@pytest.mark.parametrize(
    ("saved", "other"),
    [
        (Net(), Net(name="head")),
        (Net(buffer=(2,)), Net()),
        (Net(), Net(buffer=(2,))),
        (Net(buffer=(2,)), Net(buffer=(3,))),
    ],
)
def test_another_network_is_refused_before_charges_are_taken_over(tmp_path, saved, other):
    path = tmp_path / "run.pt"
    engine, net, optimizer, private = made(saved)
    steps.train(net, optimizer, private, 2)
    engine.save_checkpoint(path, module=net, optimizer=optimizer)
    engine, net, optimizer, _ = made(other)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with refused("checkpoint"):
        engine.load_checkpoint(path, module=net, optimizer=optimizer)
    assert len(engine.accountant) == 0
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_checkpoint_of_something_else_or_without_an_optimizer(tmp_path):
    path = tmp_path / "run.pt"
    engine, net, optimizer, _ = made()
    with refused("optimizer-not-private"):
        engine.load_checkpoint(path, module=net, optimizer=None)
    torch.save({}, path)
    with refused("checkpoint"):
        engine.load_checkpoint(path, module=net, optimizer=optimizer)
    path.write_text("no checkpoint")
    with refused("checkpoint"):
        engine.load_checkpoint(path, module=net, optimizer=optimizer)
