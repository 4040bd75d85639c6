"""The recipes of docs/how_to/frameworks.md run as they stand there."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.frameworks import LIGHTNING_WARNS
from test_transformers import classifier, sentences
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb

PAGE = Path(__file__).parents[2] / "docs/how_to/frameworks.md"
pytestmark = [pytest.mark.slow, *LIGHTNING_WARNS]


@pytest.mark.parametrize("place", range(3), ids=["Lightning", "accelerate", "Trainer"])
def test_the_recipe_runs(place, tmp_path, monkeypatch):
    import accelerate
    import transformers

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    accelerate.state.AcceleratorState._reset_state(True)
    data = TensorDataset(torch.randn(64, 4), torch.randint(3, (64,)))
    names = {
        "dpb": dpb,
        "F": F,
        "partial": partial,
        "DataLoader": DataLoader,
        "Accelerator": accelerate.Accelerator,
        "Trainer": transformers.Trainer,
        "TrainingArguments": transformers.TrainingArguments,
        "engine": dpb.PrivacyEngine(),
        "net": classifier() if place == 2 else nn.Linear(4, 3),
        "loader": DataLoader(data, batch_size=16),
        "dataset": sentences(),
    }
    code = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)[place]
    for large, small in (("=20", "=2"), ("batch_size=64", "batch_size=16")):
        code = code.replace(large, small)
    exec(code, names)
    epochs = (2, 1, 3)[place]
    assert len(names["engine"].accountant) == epochs * len(names["loader"])
