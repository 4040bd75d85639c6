"""The rows of the private head's table, on made-up pictures in torchvision's layout."""

import csv
import sys

import pytest
from support import pictures

pytest.importorskip("torchvision")

import private_heads


@pytest.mark.thorough
def test_a_row_on_made_up_pictures(tmp_path, monkeypatch):
    for name in ("MNIST", "FashionMNIST"):
        pictures.write(tmp_path / name, "train", 400)
        pictures.write(tmp_path / name, "t10k", 50)
    output = tmp_path / "rows.csv"
    arguments = f"mnist --epsilon 50 --data-root {tmp_path} --runs 1 --epochs 30 --lr 4"
    arguments += f" --batch-size 400 --warm-up 5 --output {output}"
    monkeypatch.setattr(sys, "argv", ["private_heads.py", *arguments.split()])
    private_heads.main()
    with output.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["predictor"] for row in rows] == list(private_heads.PREDICTORS)
    for row in rows:  # bars at ten heights
        assert float(row["accuracy"]) > 0.8 and float(row["selective"]) > 0.8
        assert 49 < float(row["epsilon"]) <= 50
