"""Each trick of the table runs at the ε that is stated, on made-up pictures."""

import pytest
import torch
from support import pictures

pytest.importorskip("torchvision")

import tricks_alone


@pytest.mark.thorough
@pytest.mark.parametrize(
    "trick",
    [
        "adaptive clip norm, from 10",
        "four views",
        "standardised weights",
        "base",
        "warm-up and cosine",
        "batches of 2000",
    ],
)
def test_a_trick_changes_one_thing_and_spends_the_budget(trick, tmp_path, monkeypatch):
    for part, count in (("train", 300), ("t10k", 50)):
        pictures.write(tmp_path / "FashionMNIST", part, count)
    settings = {**tricks_alone.BASE, **tricks_alone.TRICKS[trick], "epochs": 6}
    settings["batch_size"] = min(settings["batch_size"], 60)
    monkeypatch.setattr(tricks_alone, "RECORDS", 300)
    rows = tricks_alone.run(str(tmp_path), trick, 0, **settings)["rows"]
    names = [trick, *tricks_alone.OF_BASE] if trick == "base" else [trick]
    assert [row["trick"] for row in rows] == names
    for row in rows:
        assert 0 <= row["accuracy"] <= 1 and row["NLL"] > 0
        assert 2.99 < row["epsilon"] <= tricks_alone.EPSILON
        assert (row["clip norm"] == settings["clip"]) is not settings.get("adaptive", False)


def test_views_are_the_picture_and_its_flips_and_shifts():
    x = torch.randn(3, 1, 6, 6)
    views, label = tricks_alone.DrawnViews(x, torch.arange(3), 5)[1]
    assert views.shape == (5, 1, 6, 6) and label == 1
    torch.testing.assert_close(views[0], x[1])
    padded = torch.nn.functional.pad(x[1], (1, 1, 1, 1), mode="replicate")
    shifts = [padded[:, i : i + 6, j : j + 6] for i in range(3) for j in range(3)]
    known = torch.stack(shifts + [shift.flip(2) for shift in shifts])
    for view in views:
        assert (known == view).flatten(1).all(1).any()
