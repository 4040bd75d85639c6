"""The recipes of docs/how_to/frameworks.md run as they stand there."""

import itertools
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.frameworks import LIGHTNING_WARNS, made, moves_nothing
from support.training import recorded
from test_transformers import classifier, sentences
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb

PAGE = Path(__file__).parents[2] / "docs/how_to/frameworks.md"
pytestmark = [pytest.mark.slow, *LIGHTNING_WARNS]


@pytest.fixture
def accelerator(monkeypatch):
    import accelerate

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    accelerate.state.AcceleratorState._reset_state(True)
    return accelerate.Accelerator()


@pytest.mark.parametrize("place", range(3), ids=["Lightning", "accelerate", "Trainer"])
def test_the_recipe_runs(place, accelerator, tmp_path, monkeypatch):
    import transformers

    monkeypatch.chdir(tmp_path)
    data = TensorDataset(torch.randn(64, 4), torch.randint(3, (64,)))
    records = sentences()
    names = {"dpb": dpb, "F": F, "partial": partial, "DataLoader": DataLoader}
    names |= {
        n: getattr(transformers, n) for n in "Trainer TrainerCallback TrainingArguments".split()
    }
    names |= {
        "Accelerator": type(accelerator),
        "samples": dpb.PosteriorSamples("categorical"),
        "batch": records[:5],
        "engine": dpb.PrivacyEngine(),
        "net": classifier() if place == 2 else nn.Linear(4, 3),
        "loader": DataLoader(data, batch_size=16),
        "dataset": records,
    }
    code = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)[place]
    for large, small in (("=20", "=2"), ("batch_size=64", "batch_size=16")):
        code = code.replace(large, small)
    exec(code, names)
    epochs = (2, 1, 2)[place]
    assert len(names["engine"].accountant) == epochs * len(names["loader"])
    assert len(names["samples"]) == (1, 0, 1)[place]  # the second half


@pytest.mark.parametrize("mode", [None, "hooks"])
@pytest.mark.parametrize("prepared", [*itertools.product([False, True], repeat=3)])
def test_accelerate_may_prepare_all_but_the_loader(prepared, mode, accelerator):
    engine, *private = made(**recorded(mode))
    net, *_, loader = private
    net_, optimizer, batches = (
        accelerator.prepare(of) if is_prepared else of for of, is_prepared in zip(private, prepared)
    )

    def train():
        for x, y in batches:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(net_(x), y))
            optimizer.step()

    if prepared[2]:
        moves_nothing(train, engine, net)
    else:
        train()
        assert len(engine.accountant) == len(loader)
