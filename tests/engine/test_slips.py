"""The commonest slips are answered in one sentence with the line to write."""

import gc
import tempfile
from functools import partial
from pathlib import Path

import numpy
import opacus
import pandas
import pytest
import torch
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator
from support.steps import one
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import torch_dpbayes as dpb

SAMPLER = partial(dpb.optim.DPSGLD, lr=0.1)
EVAL_LINE = '[m.eval() for m in model.modules() if "BatchNorm" in type(m).__name__]'
OPACUS_SAYS = ("We have written", "We do not support", "running stats :)", "The reason for it is")


def loader_of(*shape):
    return DataLoader(TensorDataset(torch.randn(60, *shape), torch.randint(3, (60,))), 10)


def made(net, optimizer=SAMPLER, shape=(4,), **options):
    return dpb.PrivacyEngine().make_private(
        module=net,
        optimizer=optimizer,
        **{
            "data_loader": loader_of(*shape),
            "max_grad_norm": 1.0,
            "noise_multiplier": 1.0,
            **options,
        },
    )


def forgotten_train(*layers):
    net, optimizer, loader = made(nn.Sequential(nn.Linear(4, 3), *layers))
    batches = iter(loader)
    one(net, optimizer, next(batches))
    net.eval()
    with torch.no_grad():
        net(torch.randn(7, 4))
    one(net, optimizer, next(batches))


def accumulated(forgets):
    net, optimizer, loader = made(nn.Linear(4, 3))
    for i, (x, y) in enumerate(loader):
        if forgets:
            optimizer.zero_grad()
        (nn.functional.cross_entropy(net(x), y) / 2).backward()
        if i % 2:
            optimizer.step()


def convolutions(norm, is_frozen=False, evaluates=False):
    body = nn.Sequential(nn.Conv2d(3, 32, 3), norm, nn.ReLU())
    body.requires_grad_(not is_frozen)
    net = nn.Sequential(body, nn.Flatten(), nn.Linear(32 * 36, 3))
    if evaluates:
        [m.eval() for m in net.modules() if "BatchNorm" in type(m).__name__]
    return net


class Skipping(nn.Module):
    """Leaves a layer out by chance."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x if torch.rand(()) < 2 else self.body(x))


def switched_on_again():
    net, optimizer, loader = made(
        convolutions(nn.BatchNorm2d(32), is_frozen=True, evaluates=True), **IMAGES
    )
    net.eval()
    net.train()
    one(net, optimizer, next(iter(loader)))


class Fields(Dataset):
    """Records as mappings."""

    def __init__(self, **more):
        self.more = more

    def __len__(self):
        return 20

    def __getitem__(self, place):
        return {"x": [0.1 * place, 1.0, 2.0, 3.0], "y": 0, **self.more}


def loaded(text, **options):
    engine = dpb.PrivacyEngine()
    net, optimizer, _ = engine.make_private(
        module=nn.Linear(4, 3), optimizer=SAMPLER, data_loader=loader_of(4), max_grad_norm=1.0
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pt"
        path.write_text(text)
        engine.load_checkpoint(path, **{"module": net, "optimizer": optimizer, **options})


def predicted(x):
    samples, net = dpb.PosteriorSamples(), nn.Linear(4, 3)
    samples.collect(net)
    samples.predict(net, x)


def drawn_from(**columns):
    frame = pandas.DataFrame({"a": [0.1, 0.2], **columns})
    model = dpb.ops.GLM("gaussian", prior_std=1.0, max_feature_norm=1.0, noise_std=1.0)
    dpb.ops.OnePosteriorSample(model, epsilon=1.0, delta=1e-5).sample(frame, numpy.ones(2))


IMAGES, SEQUENCES = {"shape": (3, 8, 8)}, {"shape": (5, 4)}
SLIPS = {
    "train() forgotten": (forgotten_train, "model.train()"),
    "train() forgotten, Dropout": (lambda: forgotten_train(nn.Dropout(0.1)), "model.train()"),
    "eval mode": (lambda: made(nn.Linear(4, 3).eval()), "model.train()"),
    "frozen BatchNorm in train()": (
        lambda: made(convolutions(nn.BatchNorm2d(32), is_frozen=True), **IMAGES),
        EVAL_LINE,
    ),
    "frozen BatchNorm in eval()": (
        lambda: made(convolutions(nn.BatchNorm2d(32), is_frozen=True).eval(), **IMAGES),
        EVAL_LINE,
    ),
    "frozen BatchNorm after model.train()": (switched_on_again, EVAL_LINE),
    "BatchNorm": (lambda: made(convolutions(nn.BatchNorm2d(32)), **IMAGES), "ModuleValidator.fix"),
    "InstanceNorm": (
        lambda: made(
            convolutions(nn.InstanceNorm2d(32, affine=True, track_running_stats=True)), **IMAGES
        ),
        "GroupNorm",
    ),
    "a layer skipped by chance": (lambda: made(Skipping()), "cannot be run for one record"),
    "a field of text": (
        lambda: made(nn.Linear(4, 3), data_loader=DataLoader(Fields(name="Ann"), 10)),
        "'name' is text",
    ),
    "DPSGLD(parameters)": (
        lambda: dpb.optim.DPSGLD(nn.Linear(4, 3).parameters(), lr=0.1),
        "PrivacyEngine().make_private",
    ),
    "optimizer=DPSGLD": (lambda: made(nn.Linear(4, 3), dpb.optim.DPSGLD), "partial(DPSGLD, lr=0.1"),
    "no clip norm": (
        lambda: made(nn.Linear(4, 3), max_grad_norm=None, noise_multiplier=None),
        "target_epsilon",
    ),
    "partial(Adam)": (
        lambda: made(nn.Linear(4, 3), partial(torch.optim.Adam)),
        "partial(torch_dpbayes.optim.DPSGLD, lr=0.25)",
    ),
    "a built Adam": (
        lambda: made(nn.Linear(4, 3), torch.optim.Adam(nn.Linear(4, 3).parameters(), lr=1e-3)),
        "partial(torch_dpbayes.optim.DPSGLD, lr=0.25)",
    ),
    "a built DPOptimizer": (
        lambda: made(
            nn.Linear(4, 3),
            DPOptimizer(
                torch.optim.SGD(nn.Linear(4, 3).parameters(), lr=0.5),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                expected_batch_size=10,
            ),
        ),
        "partial(torch_dpbayes.optim.DPSGLD, lr=0.25)",
    ),
    "a name": (lambda: made(nn.Linear(4, 3), "sgld"), "partial(torch_dpbayes.optim.DPSGLD"),
    "a GradSampleModule": (
        lambda: made(opacus.GradSampleModule(nn.Linear(4, 3))),
        "module=model._module",
    ),
    "accountant='rdp'": (
        lambda: dpb.PrivacyEngine(accountant="rdp"),
        'PrivacyAccountant(method="rdp")',
    ),
    "an accountant of Opacus": (
        lambda: dpb.PrivacyEngine(opacus.accountants.RDPAccountant()),
        "torch_dpbayes.PrivacyAccountant()",
    ),
    "grad_sample_mode='ghost'": (
        lambda: made(nn.Linear(4, 3), grad_sample_mode="ghost"),
        '"bookkeeping" (the default, as Opacus\' "ghost")',
    ),
    "a checkpoint of something else": (lambda: loaded("no checkpoint"), "save_checkpoint"),
    "a checkpoint without optimizer": (
        lambda: loaded("", optimizer=None),
        "pass the module and optimizer that make_private returned",
    ),
    "predictions of an array": (lambda: predicted(numpy.ones((3, 4))), "torch.as_tensor("),
    "predictions of a frame": (
        lambda: predicted(pandas.DataFrame([[1.0] * 4])),
        "torch.as_tensor(",
    ),
    "a column of text": (lambda: drawn_from(city=["Bonn", "Kiel"]), "'city' of the DataFrame"),
    "gradients that add up": (lambda: accumulated(False), "BatchMemoryManager"),
    "gradients that would add up": (lambda: accumulated(True), "BatchMemoryManager"),
}


def answer(name):
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        SLIPS[name][0]()
    return str(caught.value)


@pytest.mark.parametrize("name", SLIPS)
def test_the_answer_names_the_line_to_write(name):
    said = answer(name)
    assert SLIPS[name][1] in said
    assert len(said.split()) <= 35
    assert not any(text in said for text in OPACUS_SAYS)


def test_an_optimizer_that_is_looked_for_at_the_top_is_found():
    with pytest.raises(AttributeError, match=r"write torch_dpbayes\.optim\.DPSGLD$"):
        _ = dpb.DPSGLD
    with pytest.raises(AttributeError, match=r"write torch_dpbayes\.ops\.GLM$"):
        _ = dpb.GLM
    with pytest.raises(AttributeError, match=r"no attribute 'DPNothing'$"):
        _ = dpb.DPNothing


@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_the_answers_say_works(is_frozen):
    net = convolutions(nn.BatchNorm2d(32), is_frozen=is_frozen, evaluates=is_frozen)
    net, optimizer, loader = made(net if is_frozen else ModuleValidator.fix(net), **IMAGES)
    one(net, optimizer, next(iter(loader)))
    assert len(optimizer.accountant) == 1


def test_accumulating_by_the_batch_memory_manager_works():
    net, optimizer, loader = made(nn.Linear(4, 3))
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
    ) as parts:
        for batch in parts:
            one(net, optimizer, batch)
    assert len(optimizer.accountant) == len(loader)


def trained_on(net, accountant, steps=1):
    """The accountant of a training that begins with ``net`` as it is."""
    _, optimizer, loader = dpb.PrivacyEngine(accountant).make_private(
        module=net, optimizer=SAMPLER, data_loader=loader_of(4), max_grad_norm=1.0
    )
    for batch, _ in zip(loader, range(steps), strict=False):
        one(net, optimizer, batch)
    return optimizer.accountant


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_model_that_goes_on_under_a_new_accountant_says_so(caplog, is_kept):
    net = nn.Linear(4, 3)
    kept = [trained_on(net, dpb.PrivacyAccountant())]
    if not is_kept:
        kept.clear()
        gc.collect()
    caplog.clear()
    later = trained_on(net, dpb.PrivacyAccountant())
    assert caplog.text.count("made private on another accountant before") == 1
    assert any("another accountant before" in note for note in later.notes)


def test_nothing_is_said_where_one_accountant_holds_both(caplog, tmp_path):
    net, accountant = nn.Linear(4, 3), dpb.PrivacyAccountant()
    first = trained_on(net, dpb.PrivacyAccountant(), steps=0)  # made private, and never trained
    for _ in range(2):
        trained_on(net, accountant)
    other = nn.Linear(4, 3)
    for _ in range(2):
        ledger = dpb.PrivacyAccountant(100.0, 1e-5, path=tmp_path / "budget.db")
        trained_on(other, ledger)
        ledger.close()
    assert "another accountant before" not in caplog.text
    assert len(first) == 0
    assert not any("another accountant before" in note for note in accountant.notes)
