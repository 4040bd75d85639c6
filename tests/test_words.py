"""Objects say what matters: noise, temperature, what is spent, how records are kept apart."""

import io
from contextlib import redirect_stderr
from functools import partial

import pytest
import torch
from support import steps
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import words
from torch_dpbayes.errors import DPBayesError

MODEL = dpb.ops.GLM("bernoulli", prior_std=0.5, max_feature_norm=1.0)


def run():
    data = TensorDataset(torch.randn(200, 4), torch.randint(3, (200,)))
    engine = dpb.PrivacyEngine()
    made = engine.make_private_with_epsilon(
        module=nn.Linear(4, 3),
        optimizer=partial(dpb.optim.DPSGLD, lr=0.5),
        data_loader=DataLoader(data, 20),
        max_grad_norm=1.0,
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=3,
    )
    steps.train(*made, steps=2)
    return engine, *made


def test_what_is_spent_and_how_records_are_kept_apart_is_said():
    engine, _, optimizer, loader = run()
    spent = f"epsilon = {engine.get_epsilon(1e-5):.4g} of 3 spent at delta = 1e-05"
    for thing in (engine, optimizer, engine.accountant):
        assert repr(thing).endswith(spent)
        assert f"width:{engine.get_epsilon() / 3.0:.1%}" in thing._repr_html_()
    temperature = f"temperature={optimizer.effective_temperature:.6g}"
    assert temperature in repr(optimizer) and "by construction" in repr(optimizer)
    assert "200 records" in repr(loader) and "probability 0.1" in repr(loader)
    assert "nothing is made private" in repr(dpb.PrivacyEngine())


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
