"""The README's code runs as it stands."""

import re
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_ten_lines(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
    names = {
        "partial": partial,
        "F": F,
        "net": nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
        "loader": DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=150, shuffle=True),
        "x_test": x[1500:],
    }
    exec(code, names)
    assert len(names["samples"]) == 10
    probabilities = names["samples"].predict(names["net"], x[1500:])
    torch.testing.assert_close(probabilities.sum(1), torch.ones(297))
    accountant = names["engine"].accountant
    assert len(accountant) == 200 and 0 < accountant.get_epsilon() <= 3
    assert accountant.summary() in capsys.readouterr().out


def test_what_the_readme_names_exists():
    import torch_dpbayes as dpb

    for name in set(re.findall(r"\bdpb\.([A-Za-z_]+)", README)):
        assert hasattr(dpb, name)
    for path in set(re.findall(r"\((?!http)([\w./-]+\.(?:md|png))\)", README)):
        assert (Path(__file__).parents[2] / path).is_file(), path
