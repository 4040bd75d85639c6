"""Errors are short, have a class and a code, and a paragraph of the documentation for each code."""

import ast
import copy
import inspect
import pickle
import re
import statistics
from functools import partial
from pathlib import Path

import opacus
import pyro
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import errors
from torch_dpbayes.ops.certificates.certificate import StepTooLarge, TooFar

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "torch_dpbayes").rglob("*.py"))
TREES = {path.relative_to(ROOT / "torch_dpbayes").as_posix(): path.read_text() for path in FILES}
TREES = {name: ast.parse(text) for name, text in TREES.items()}
HEADINGS = re.findall(r"^### ([a-z-]+)$", (ROOT / errors.PAGE).read_text(), re.MULTILINE)
# by file: Python's protocols, and what never leaves the library
OF_PYTHON = {
    ("__init__.py", "AttributeError"),
    ("accounting/fft_composition.py", "OverflowError"),
    ("accounting/privacy_loss.py", "OverflowError"),
    ("accounting/privacy_loss.py", "TypeError"),
    ("accounting/tilted_window.py", "OverflowError"),
    ("density/pieces.py", "IndexError"),
    ("density/record_statistics.py", "ValueError"),
    ("mcmc/kernel.py", "AttributeError"),
    ("ops/__init__.py", "AttributeError"),
    ("posterior/files.py", "ModuleNotFoundError"),
}


def codes():
    """Of classes, of raised errors, and of what per_sample hands on as a string."""
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "code":
                value = node.value
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "code":
                value = node.value
            elif isinstance(node, ast.Constant) and re.fullmatch(
                r"(loss|model|step)-[a-z-]+", str(node.value)
            ):
                value = node
            else:
                continue
            if isinstance(value, ast.Constant):
                yield value.value


def test_every_code_is_a_heading_and_no_other():
    assert len(HEADINGS) == len(set(HEADINGS))
    assert set(codes()) == set(HEADINGS)


def test_errors_are_of_this_library():
    found = set()
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and node.exc is not None:
                kind = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
                if isinstance(kind, ast.Name):
                    builtin = getattr(__import__("builtins"), kind.id, None)
                    found |= {(name, kind.id)} if inspect.isclass(builtin) else set()
    assert found == OF_PYTHON


KINDS = [
    *(kind for kind in vars(errors).values() if inspect.isclass(kind)),
    *(dpb.PrivacyBudgetExceeded, StepTooLarge, TooFar),
]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_keep_their_code(kind):
    error = kind("too large: write 1", code="a-code")
    for again in (error, pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is kind and isinstance(again, dpb.DPBayesError)
        assert str(again) == "too large: write 1" and again.code == "a-code"
        assert again.__notes__ == [f"why: {errors.PAGE}#a-code"]
    if hasattr(kind, "code"):
        assert kind("too large").code == kind.code in HEADINGS
    bases = {b for b in kind.__mro__ if b.__module__ == "builtins"} - {object, BaseException}
    assert kind is dpb.DPBayesError or len(bases) > 1


def texts_of(tree):
    """The strings below ``tree`` in which a reader finds sentences, each value in them as one word;
    docstrings are none, nor is what is split into words or sent to SQLite.
    """
    apart = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) or (isinstance(node, ast.Attribute) and node.attr == "split"):
            apart.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            apart.update(node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and node not in apart:
            yield "".join(v.value if isinstance(v, ast.Constant) else "x" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in apart:
            if not node.value.startswith("CREATE TABLE"):
                yield node.value


def test_errors_are_short():
    """At most 35 words, of whatever is said; half of the errors at most 18."""
    raised = []
    for name, tree in TREES.items():
        for text in texts_of(tree):
            assert len(text.split()) <= 35, (name, text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                raised += [max(map(len, map(str.split, texts_of(node.exc))), default=0)]
    said = [words for words in raised if words > 3]  # the others take their words from elsewhere
    assert len(said) > 500 and statistics.median(said) <= 18


DATA = TensorDataset(torch.randn(30, 4), torch.randint(3, (30,)))
SAMPLER = partial(dpb.optim.DPSGLD, lr=0.1)


def made(net=None, optimizer=SAMPLER, loader=None, engine=None, **options):
    return (engine or dpb.PrivacyEngine()).make_private(
        module=nn.Linear(4, 3) if net is None else net,
        optimizer=optimizer,
        data_loader=DataLoader(DATA, 10) if loader is None else loader,
        **{"max_grad_norm": 1.0, "noise_multiplier": 1.0, **options},
    )


def two_passes():
    loader = made()[2]
    first = iter(loader)
    next(first)
    next(iter(loader))
    next(first)


def a_batch_without_step():
    net, optimizer, loader = made()
    batches = iter(loader)
    next(batches)
    next(batches)
    optimizer.step()


def another_optimizer():
    net = nn.Linear(4, 3)
    made(net, torch.optim.SGD(net.parameters(), lr=0.1))


def bare(**options):
    parameters = {"num_data": 30, "expected_batch_size": 10, "max_grad_norm": 1.0}
    return dpb.optim.DPSGLD(nn.Linear(4, 3).parameters(), **{"lr": 0.1, **parameters, **options})


def with_budget(**options):
    engine = dpb.PrivacyEngine(dpb.PrivacyAccountant(1.0, 1e-5))
    return engine.make_private_with_epsilon(
        module=nn.Linear(4, 3),
        optimizer=SAMPLER,
        data_loader=DataLoader(DATA, 10),
        max_grad_norm=1.0,
        **{"target_epsilon": 1.0, "target_delta": 1e-5, "epochs": 1, **options},
    )


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(DATA)


# code: class, and what raises it
REFUSED = {
    "argument": (errors.ArgumentError, lambda: bare(max_grad_norm=-1.0)),
    "argument-type": (errors.ArgumentTypeError, lambda: dpb.PrivacyEngine(accountant="prv")),
    "state": (
        errors.StateError,
        lambda: dpb.PosteriorSamples().predict(nn.Linear(4, 3), torch.ones(2, 4)),
    ),
    "copied": (errors.ArgumentTypeError, lambda: pickle.dumps(bare())),
    "model-eval": (errors.ModelError, lambda: made(nn.Linear(4, 3).eval())),
    "model-wrapped": (
        errors.ArgumentTypeError,
        lambda: made(opacus.GradSampleModule(nn.Linear(4, 3))),
    ),
    "loader-two-passes": (errors.StateError, two_passes),
    "loader-no-batch": (errors.StateError, lambda: made()[1].step()),
    "loader-no-step": (errors.StateError, a_batch_without_step),
    "loader-iterable": (errors.ArgumentError, lambda: made(loader=DataLoader(Stream(), 10))),
    "loader-sampler": (
        errors.ArgumentError,
        lambda: made(
            loader=DataLoader(
                DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 10, drop_last=True)
            )
        ),
    ),
    "loader-repeats": (
        errors.ArgumentError,
        lambda: made(loader=DataLoader(torch.utils.data.Subset(DATA, [0] * 30), 10)),
    ),
    "data-private": (
        errors.ArgumentError,
        lambda: dpb.simulate_gradient_norms(nn.Linear(4, 3), made()[2]),
    ),
    "optimizer-not-private": (errors.ArgumentTypeError, another_optimizer),
    "optimizer-settings": (
        errors.ArgumentError,
        lambda: made(optimizer=partial(SAMPLER, max_grad_norm=2.0)),
    ),
    "optimizer-parameters": (
        errors.ArgumentError,
        lambda: made(optimizer=lambda parameters, **given: SAMPLER(parameters[:1], **given)),
    ),
    "budget-target": (errors.ArgumentError, lambda: with_budget(target_epsilon=2.0)),
    "budget-delta": (
        errors.ArgumentError,
        lambda: dpb.PrivacyEngine().plan(
            module=nn.Linear(4, 3),
            optimizer=SAMPLER,
            data_loader=DataLoader(DATA, 10),
            max_grad_norm=1.0,
            noise_multiplier=1.0,
            epochs=1,
        ),
    ),
    "samples": (errors.SamplesError, lambda: dpb.PosteriorSamples().collect(nn.ReLU())),
    "certificate": (
        errors.CertificateError,
        lambda: dpb.ops.FiniteRunLangevin(steps=10, lipschitz=1.0),
    ),
    "audit": (
        errors.AuditError,
        lambda: dpb.audit.repeated(float, delta=1e-5, repeats=1, epsilon=1.0),
    ),
    "pyro-guide": (
        errors.ArgumentTypeError,
        lambda: dpb.infer.DPSVI(
            lambda x: None,
            print,
            pyro.optim.Adam({"lr": 0.01}),
            pyro.infer.Trace_ELBO(),
            max_grad_norm=1.0,
            noise_multiplier=1.0,
            expected_batch_size=10,
        ),
    ),
}


@pytest.mark.parametrize("code", REFUSED)
def test_refusals(code):
    kind, refused = REFUSED[code]
    with pytest.raises(kind) as caught:
        refused()
    assert type(caught.value) is kind and caught.value.code == code in HEADINGS
    assert caught.value.__notes__ == [f"why: {errors.PAGE}#{code}"]


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / "samples.pt").write_bytes(b"nothing")
    with pytest.raises(errors.CheckpointError) as caught:
        dpb.PosteriorSamples.load(tmp_path / "samples.pt")
    assert caught.value.code == "checkpoint"


def test_errors_of_the_callers_code_are_left_alone():
    def loss(output, target):
        raise ValueError("mine")

    samples = dpb.PosteriorSamples()
    samples.collect(net := nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"^mine$") as caught:
        samples.predict(net, torch.randn(3, 4), forward=loss)
    assert not hasattr(caught.value, "__notes__")
