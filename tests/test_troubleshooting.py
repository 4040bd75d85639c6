"""Errors are short, have a class and a code, and a paragraph of the documentation for each code."""

import ast
import copy
import inspect
import pickle
import re
import statistics
from pathlib import Path

import pytest
import torch
from support.sources import trees
from torch import nn

import torch_dpbayes as dpb
from torch_dpbayes import errors
from torch_dpbayes.ops.certificates.certificate import TooFar
from torch_dpbayes.ops.certificates.finite_run_langevin import StepTooLarge

ROOT = Path(__file__).resolve().parents[1]
HEADINGS = re.findall(r"^### ([a-z-]+)$", (ROOT / errors.PAGE).read_text(), re.MULTILINE)
HANDED_ON = r"(loss|model|step)-[a-z-]+"
# by file: Python's protocols, and what never leaves the library
OF_PYTHON = {
    ("__init__.py", "AttributeError"),
    ("accounting/fft_composition.py", "OverflowError"),
    ("accounting/privacy_loss.py", "OverflowError"),
    ("accounting/privacy_loss.py", "TypeError"),
    ("accounting/tilted_window.py", "OverflowError"),
    ("density/pieces.py", "IndexError"),
    ("density/record_density.py", "ValueError"),
    ("ops/__init__.py", "AttributeError"),
    ("posterior/files.py", "ModuleNotFoundError"),
}


def codes():
    """Of classes, of raised errors, and of what per_sample hands on as a string."""
    for tree in trees().values():
        for node in ast.walk(tree):
            is_code = (isinstance(node, ast.keyword) and node.arg == "code") or (
                isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "code"
            )
            found = getattr(node.value if is_code else node, "value", None)
            if isinstance(found, str) and (is_code or re.fullmatch(HANDED_ON, found)):
                yield found


def test_every_code_is_a_heading_and_no_other():
    assert len(HEADINGS) == len(set(HEADINGS))
    assert set(codes()) == set(HEADINGS)


def test_errors_are_of_this_library():
    found = set()
    for name, tree in trees().items():
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
    for name, tree in trees().items():
        for text in texts_of(tree):
            assert len(text.split()) <= 35, (name, text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                raised += [max(map(len, map(str.split, texts_of(node.exc))), default=0)]
    said = [words for words in raised if words > 3]  # the others take their words from elsewhere
    assert len(said) > 500 and statistics.median(said) <= 18


def test_errors_of_the_callers_code_are_left_alone():
    def forward(*_):
        raise ValueError("mine")

    samples = dpb.PosteriorSamples()
    samples.collect(net := nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"^mine$") as caught:
        samples.predict(net, torch.randn(3, 4), forward=forward)
    assert not hasattr(caught.value, "__notes__")
