"""What objects show: epsilon that is spent, how far a long call is, no numbers of records."""

import io
from contextlib import redirect_stderr

import pytest
import torch
from support.training import made_private
from torch import nn

import torch_dpbayes as dpb
from torch_dpbayes import words
from torch_dpbayes.errors import DPBayesError

MODEL = dpb.ops.GLM("bernoulli", prior_std=0.5, max_feature_norm=1.0)


def test_what_is_spent_is_shown():
    accountant = dpb.PrivacyAccountant(3.0, 1e-5)
    accountant.step(noise_multiplier=4.0, sample_rate=0.1)
    engine = dpb.PrivacyEngine(accountant)
    _, optimizer, loader = made_private(engine=engine)
    spent = f"epsilon = {accountant.get_epsilon():.4g} of 3 spent at delta = 1e-05"
    for thing in (engine, optimizer, accountant):
        assert repr(thing).endswith(spent)
        assert f"width:{accountant.get_epsilon() / 3.0:.1%}" in thing._repr_html_()
    assert f"temperature={optimizer.effective_temperature:.6g}" in repr(optimizer)
    assert "20 records" in repr(loader) and repr(dpb.PrivacyEngine())


def test_what_takes_long_shows_how_far_it_is(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(words, "_SOON", 0.0)
    target = dpb.ops.OnePosteriorSample(
        MODEL, dpb.ops.FiniteRunLangevin(steps=5), epsilon=1.0, delta=1e-5
    )
    x, y = torch.rand(20, 2) / 2, torch.zeros(20)
    for stream, is_said in ((Terminal(), True), (io.StringIO(), False)):
        with redirect_stderr(stream):
            target_draw = list(words.shown(range(3), "drawing"))
        assert target_draw == [0, 1, 2] and ("drawing" in stream.getvalue()) is is_said
    terminal = Terminal()
    with redirect_stderr(terminal):
        target.sample(x, y)
    assert "drawing one posterior sample" in terminal.getvalue()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: dpb.ops.OnePosteriorSample(x),
        lambda x: dpb.ops.GLM(prior_std=-x),
        lambda x: dpb.noise_aware.sufficient_statistics(x, epsilon=1.0, delta=1e-5),
        lambda x: dpb.PrivacyEngine(nn.Parameter(x)),
        lambda x: dpb.noise_aware.posterior(MODEL, x, x[:, 0], epsilon=1.0, delta=1e-5, public=x),
        lambda x: dpb.PosteriorSamples("normal", noise_std=x.numpy()),
        lambda x: dpb.get_noise_multiplier(
            target_epsilon=x, target_delta=1e-5, sample_rate=0.1, steps=5
        ),
    ],
)
def test_no_error_shows_the_numbers_of_an_argument_in_the_wrong_place(call):
    with pytest.raises(DPBayesError) as error:
        call(torch.full((3, 2), 77.125, dtype=torch.float64))
    assert "77.1" not in str(error.value)
