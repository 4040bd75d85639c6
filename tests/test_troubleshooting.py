"""Errors are short, and say which paragraph of the documentation explains them, which exists."""

import ast
import inspect
import re
import statistics
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import troubleshooting

ROOT = Path(__file__).resolve().parents[1]
HEADINGS = re.findall(r"^#+ (.*)$", (ROOT / troubleshooting.PAGE).read_text(), re.MULTILINE)
ANCHORS = {troubleshooting.anchor(heading) for heading in HEADINGS}


def test_every_paragraph_that_is_pointed_to_exists():
    for heading in (*troubleshooting.EXPLAINED, *troubleshooting.SECTIONS.values()):
        assert troubleshooting.anchor(heading) in ANCHORS, heading


def test_every_error_on_the_page_is_pointed_to():
    explained = {heading.strip('"') for heading in HEADINGS if heading.startswith('"')}
    # a count stands in the middle of this one
    assert {e for e in explained if "…" not in e} == set(troubleshooting.EXPLAINED)


def codes():
    found = set()
    for path in (ROOT / "torch_dpbayes").rglob("*.py"):
        found |= set(re.findall(r"""["']((?:loss|model|step)-[a-z-]+)["']""", path.read_text()))
    return found


def test_every_code_of_an_error_is_a_heading_and_no_other():
    assert codes() == {h for h in HEADINGS if re.fullmatch(r"(loss|model|step)-[a-z-]+", h)}


def test_every_file_that_raises_has_a_section():
    package = ROOT / "torch_dpbayes"
    for path in package.rglob("*.py"):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        if re.search(r"^\s+raise [A-Z]", path.read_text(), re.MULTILINE):
            assert room in (*troubleshooting.SECTIONS, "__init__"), path


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
    for path in (ROOT / "torch_dpbayes").rglob("*.py"):
        tree = ast.parse(path.read_text())
        for text in texts_of(tree):
            assert len(text.split()) <= 35, (path, text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                raised += [max(map(len, map(str.split, texts_of(node.exc))), default=0)]
    said = [words for words in raised if words > 3]  # the others take their words from elsewhere
    assert len(said) > 500 and statistics.median(said) <= 18


ROOMS = [getattr(dpb, name) for name in dpb.__all__ if inspect.ismodule(getattr(dpb, name))]
PUBLIC = [
    (room, name) for room in (dpb, *ROOMS) for name in room.__all__ if callable(getattr(room, name))
]


@pytest.mark.parametrize(
    ("module", "name"), PUBLIC, ids=lambda value: getattr(value, "__name__", value)
)
def test_every_public_name_points(module, name):
    door = getattr(module, name)
    if getattr(door, "_is_protocol", False):
        return  # what others write
    if inspect.isclass(door):
        own = [m for n, m in vars(door).items() if inspect.isfunction(m) and n[0] != "_"]
        assert all(hasattr(member, "points_to_page") for member in own)
        door = vars(door).get("__init__", partial(print))
        if not inspect.isfunction(door) or getattr(dpb, name, None) is dpb.PrivacyBudgetExceeded:
            return
    assert hasattr(door, "points_to_page") or getattr(door, "__module__", "") == "typing"


def made():
    data = TensorDataset(torch.randn(30, 4), torch.randint(3, (30,)))
    return dpb.PrivacyEngine().make_private(
        module=nn.Linear(4, 3),
        optimizer=partial(dpb.optim.DPSGLD, lr=0.1),
        data_loader=DataLoader(data, 10),
        max_grad_norm=1.0,
        noise_multiplier=1.0,
    )


def no_batch():
    made()[1].step()


def no_eval_mode():
    dpb.PrivacyEngine().make_private(
        module=nn.Linear(4, 3).eval(),
        optimizer=partial(dpb.optim.DPSGLD, lr=0.1),
        data_loader=made()[2],
        max_grad_norm=1.0,
    )


def two_passes():
    loader = made()[2]
    first = iter(loader)
    next(first)
    next(iter(loader))
    next(first)


POINTED = {
    "#argument": lambda: dpb.PrivacyAccountant(epsilon=-1.0, delta=1e-5),
    "#model-eval": no_eval_mode,
    "#two-passes-over-one-private-loader-at-a-time": two_passes,
    "#samples-and-predictions": lambda: dpb.PosteriorSamples(thin=0),
    "#one-posterior-sample": lambda: dpb.ops.GLM("nonsense"),
    "#no-new-batch-came-from-the-private-loader-since-the-last-step": no_batch,
}


@pytest.mark.parametrize("where", POINTED)
def test_errors_point_once(where):
    with pytest.raises((ValueError, RuntimeError)) as caught:
        POINTED[where]()
    assert caught.value.__notes__ == [f"why: {troubleshooting.PAGE}{where}"]
    assert where.removeprefix("#") in ANCHORS


def test_errors_of_the_callers_code_are_left_alone():
    def loss(output, target):
        raise ValueError("mine")

    net, _, loader = dpb.PrivacyEngine().make_private(
        module=nn.Linear(4, 3),
        optimizer=partial(dpb.optim.DPSGLD, lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(30, 4)), 10, collate_fn=_collate),
        max_grad_norm=1.0,
        noise_multiplier=1.0,
        example_inputs=(torch.randn(2, 4),),
    )
    samples = dpb.PosteriorSamples()
    samples.collect(net)
    with pytest.raises(ValueError, match=r"^mine$"):
        samples.predict(net, torch.randn(3, 4), forward=loss)


def _collate(records):
    return torch.stack([record[0] for record in records])
