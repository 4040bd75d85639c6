"""What an audit hands out: words, JSON, a picture, and an exit status."""

import json
from dataclasses import replace

import matplotlib
import pytest

from torch_dpbayes.audit import AuditResult, __main__
from torch_dpbayes.audit.bounds import Guesses

RESULT = AuditResult(
    epsilon_lower_bound=1.25,
    epsilon=2.0,
    delta=1e-5,
    confidence=0.99,
    threat="white-box: all is seen",
    bound="gaussian",
    guesses=Guesses(1000, 250, 200),
    neighboring="add_or_remove_one",
)
REFUTED = replace(RESULT, epsilon=1.0)


def test_words():
    assert str(RESULT).splitlines() == [
        "epsilon at least  1.25  (delta = 1e-05, 99% confidence, gaussian bound)",
        "epsilon stated    2  (add_or_remove_one): not refuted",
        "guesses           200 of 250 right, 1000 canaries",
        "threat            white-box: all is seen",
    ]
    assert "REFUTED" in str(REFUTED) and REFUTED.is_refuted and not RESULT.is_refuted


def test_json_has_everything():
    values = json.loads(RESULT.to_json())
    assert values.pop("is_refuted") is False
    assert AuditResult(**{**values, "guesses": Guesses(**values["guesses"])}) == RESULT
    assert json.loads(replace(RESULT, epsilon=float("inf")).to_json())["epsilon"] is None


def test_the_picture_shows_both_numbers():
    matplotlib.use("Agg")
    for result, verdict in ((RESULT, "not refuted"), (REFUTED, "ε refuted")):
        ax = result.plot()
        assert sorted(bar.get_width() for bar in ax.patches) == sorted(
            [result.epsilon, result.epsilon_lower_bound]
        )
        assert verdict in ax.get_title("left")
        for fact in ("δ = 1e-05", "200 of 250", "1000 canaries", "white-box: all is seen"):
            assert fact in ax.get_xlabel()
        assert result.plot(ax) is ax
        matplotlib.pyplot.close(ax.figure)


def test_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["--canaries", "500", "--json", "a.json", "--picture", "a.png", "--seed", "3"]
    assert __main__.main(given) == 0
    assert "not refuted" in capsys.readouterr().out
    values = json.loads((tmp_path / "a.json").read_text())
    assert values["command"] == "python -m torch_dpbayes.audit " + " ".join(given)
    assert values["epsilon"] == pytest.approx(8.0, rel=1e-2)
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_the_command_line_says_with_its_status_that_more_is_revealed(monkeypatch, capsys):
    monkeypatch.setattr(__main__, "one_run", lambda *_, **__: REFUTED)
    assert __main__.main([]) == 1
    assert "REFUTED" in capsys.readouterr().out


def test_a_training_of_the_users(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_audited.py").write_text(
        "from torch_dpbayes.audit.__main__ import _made_up_records as records\n"
        "from torch_dpbayes.audit.__main__ import _small_training as train\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    mine = ["--train", "my_audited:train", "--data", "my_audited:records"]
    assert __main__.main([*mine, "--canaries", "200"]) == 0
    assert "200 canaries" in capsys.readouterr().out


@pytest.mark.parametrize(
    "given, message",
    [
        (["--train", "a:b"], "--train and --data belong together"),
        (["--train", "no_such_module:b", "--data", "a:b"], "no_such_module"),
        (["--train", "json", "--data", "a:b"], "write MODULE:NAME"),
        (["--canaries", "3"], "3 canaries give no lower bound"),
    ],
)
def test_the_command_line_says_what_is_wrong(given, message):
    with pytest.raises(SystemExit, match=message):
        __main__.main(given)
