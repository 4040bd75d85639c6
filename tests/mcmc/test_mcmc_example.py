"""The Pyro example as people call it."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def example():
    path = ROOT / "examples" / "pyro_logistic_regression.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def spent(out):
    return [float(number) for number in re.findall(r"spent +epsilon <= ([\d.]+)", out)][-1]


@pytest.mark.thorough
def test_one_accountant_pays_for_the_start_and_the_chain(example, capsys, tmp_path):
    picture = tmp_path / "logistic.png"
    short = "--records 3000 --iterations 12 --steps 2 --epsilon 2 --plot".split()
    example.main([*short, str(picture)])
    out = capsys.readouterr().out
    assert 1.98 < spent(out) <= 2
    assert re.search(r"DPSGLD +[\d.]+% of the cost, 200 releases", out)
    assert re.search(r"DPHMC +[\d.]+% of the cost, 37 releases", out)
    assert "without privacy" in out and "8 samples" in out
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


ROW = (
    "{}, Private, 77516, Bachelors, {}, {}, Adm-clerical, Not-in-family, White, Male, {}, 0, {},"
    " United-States, {}"
)


@pytest.mark.thorough
def test_adult_is_read_where_it_lies(example, capsys, tmp_path):
    folder = tmp_path / "adult"
    folder.mkdir()
    for name, end in (("adult.data", ""), ("adult.test", ".")):
        lines = []
        for i in range(900):
            married, rich = [("Divorced", "<=50K"), ("Married-civ-spouse", ">50K")][i % 2]
            row = ROW.format(20 + i % 70, i % 17, married, i % 3000, i % 99, rich)
            lines.append(row + end)
        (folder / name).write_text("|1x3 Cross validator\n" * bool(end) + "\n".join(lines) + "\n\n")
    table = example.adult(folder)
    assert len(table.x) == len(table.test_x) == 900 and table.y.mean() == table.test_y.mean() == 0.5
    assert table.x.norm(dim=1).max() <= 1 + 1e-6
    assert torch.equal(table.x[:, table.names.index("married")] > 0, table.y == 1)
    example.main(["--data-root", str(tmp_path), "--iterations", "6", "--steps", "1"])
    out = capsys.readouterr().out
    assert "without privacy" not in out and spent(out) <= 3
