"""Objects say what matters: noise, temperature, what is spent, how records are kept apart."""

import io
import re
from contextlib import redirect_stderr
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import words
from torch_dpbayes.accounting.report import spent_in_words

MODEL = dpb.ops.GLM("bernoulli", prior_std=0.5, max_feature_norm=1.0)


def run(steps=2, budget=3.0):
    engine = dpb.PrivacyEngine()
    data = TensorDataset(torch.randn(200, 4), torch.randint(3, (200,)))
    arguments = {
        "module": nn.Linear(4, 3),
        "optimizer": partial(dpb.optim.DPSGLD, lr=0.5),
        "data_loader": DataLoader(data, 20),
        "max_grad_norm": 1.0,
    }
    if budget is None:
        made = engine.make_private(**arguments, noise_multiplier=4.0)
    else:
        made = engine.make_private_with_epsilon(
            **arguments, target_epsilon=budget, target_delta=1e-5, epochs=3
        )
    net, optimizer, loader = made
    for _, (x, y) in zip(range(steps), loader, strict=False):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return engine, *made


def test_engine_optimizer_and_loader():
    engine, _, optimizer, loader = run()
    epsilon = engine.get_epsilon(1e-5)
    spent = f"epsilon = {epsilon:.4g} of 3 spent at delta = 1e-05"
    assert repr(engine).endswith(spent) and "releases=2" in repr(engine)
    for number in (
        "lr=0.5,",
        f"noise_multiplier={optimizer.effective_noise_multiplier:.6g}",
        f"temperature={optimizer.effective_temperature:.6g}",
        "sampling='poisson'",
        "by construction",
    ):
        assert number in repr(optimizer)
    assert repr(optimizer).endswith(spent)
    assert "200 records" in repr(loader) and "probability 0.1" in repr(loader)
    assert "nothing is made private" in repr(dpb.PrivacyEngine())
    assert repr(dpb.PrivacyEngine()) == dpb.PrivacyEngine()._repr_html_()
    assert repr(engine.accountant).endswith(spent) and "2 releases" in repr(engine.accountant)


def test_the_bar_of_a_notebook_is_as_long_as_what_is_spent():
    engine, _, optimizer, _ = run()
    share = f"{engine.get_epsilon() / 3.0:.1%}"
    for thing in (engine, optimizer, engine.accountant):
        assert f"width:{share}" in thing._repr_html_()
    engine, _, optimizer, _ = run(budget=None)
    assert "width:" not in engine.accountant._repr_html_() + engine._repr_html_()
    assert "epsilon = " in optimizer._repr_html_()
    optimizer.param_groups[0]["lr"] = -1.0
    assert "invalid" in repr(optimizer)


def test_what_cannot_be_read_is_said_and_no_error(tmp_path):
    accountant = dpb.PrivacyAccountant(2.0, 1e-5, path=tmp_path / "budget.db")
    accountant.close()
    assert "epsilon = " in spent_in_words(accountant)


def test_one_posterior_sample_and_kernels():
    sample = dpb.ops.OnePosteriorSample(MODEL, epsilon=1.0, delta=1e-5)
    assert "FiniteRunLangevin" in repr(sample) and "0 of 1 spent" in repr(sample)
    assert "width:0.0%" in sample._repr_html_()
    kernel = dpb.mcmc.DPPenalty(
        lambda x: None,
        proposal_scale=0.1,
        log_ratio_slope=1.0,
        noise_multiplier=7.0,
        accountant=dpb.PrivacyAccountant(2.0, 1e-5),
    )
    assert "noise_multiplier=7" in repr(kernel) and "0 of 2 spent" in repr(kernel)
    assert "width:0.0%" in kernel._repr_html_()


def test_the_module_of_samples_shows_public_names():
    assert dir(import_module("torch_dpbayes.posterior")) == ["PosteriorSamples"]


@pytest.mark.parametrize(
    "module", ["audit", "infer", "mcmc", "metrics", "noise_aware", "ops", "optim"]
)
def test_public_modules_show_public_names(module):
    found = getattr(dpb, module)
    assert dir(found) == sorted(found.__all__)
    for name in found.__all__:
        assert getattr(found, name) is not None


def test_a_checkpoint_goes_on_where_it_was(tmp_path):
    path = tmp_path / "run.pt"
    engine, net, optimizer, _ = run()
    engine.save_checkpoint(path, module=net, optimizer=optimizer, checkpoint_dict={"epoch": 3})
    other, its_net, its_optimizer, its_loader = run(steps=0)
    left = other.load_checkpoint(path, module=its_net, optimizer=its_optimizer)
    assert left == {"epoch": 3}
    assert other.get_epsilon() == pytest.approx(engine.get_epsilon(), rel=1e-9)
    assert all(map(torch.equal, its_net.parameters(), net.parameters()))
    x, y = next(iter(its_loader))
    nn.functional.cross_entropy(its_net(x), y).backward()
    its_optimizer.step()
    assert len(other.accountant) == 3
    # charges that the accountant does not hold
    third, third_net, third_optimizer, _ = run(steps=1)
    before = [p.clone() for p in third_net.parameters()]
    with pytest.raises(ValueError):
        third.load_checkpoint(path, module=third_net, optimizer=third_optimizer)
    assert all(map(torch.equal, third_net.parameters(), before))
    with pytest.raises(ValueError, match="rename it"):
        engine.save_checkpoint(
            path, module=net, optimizer=optimizer, checkpoint_dict={"module_state_dict": 1}
        )
    torch.save({"weights": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match="not written by"):
        engine.load_checkpoint(path, module=net, optimizer=optimizer)


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


def printed_terms():
    """Names of numbers, and what stands before the numbers of a summary and a plan."""
    engine, _, optimizer, loader = run()
    kernel = dpb.mcmc.DPHMC(
        lambda x: None,
        step_size=0.1,
        num_steps=3,
        log_ratio_slope=1.0,
        max_grad_norm=1.0,
        ratio_noise_multiplier=7.0,
        grad_noise_multiplier=7.0,
        accountant=dpb.PrivacyAccountant(2.0, 1e-5),
    )
    draw = dpb.ops.OnePosteriorSample(MODEL, epsilon=1.0, delta=1e-5)
    for thing in (engine, optimizer, kernel, draw):
        yield from re.findall(r"(\w+)=", repr(thing))
    yield from re.findall(r"(\w+)=", repr(engine.accountant))
    yield from re.findall(r"^  ([a-z ]+?)  ", engine.accountant.summary(), re.MULTILINE)
    plan = engine.plan(
        module=nn.Linear(4, 3),
        optimizer=partial(dpb.optim.DPSGLD, lr=0.5),
        data_loader=DataLoader(loader.dataset, 20),
        max_grad_norm=1.0,
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=1,
    )
    yield from re.findall(r"^([a-z ]+?)  ", str(plan), re.MULTILINE)
    yield from ("z_L", "z_min", "floor", "sampling rate", "free", "filter", "rho")
    yield from ("adaptive", "by construction", "vouched for by the user", "R̂", "label")


@pytest.mark.thorough
def test_every_term_that_is_printed_is_in_the_glossary():
    page = (Path(__file__).parents[1] / "docs/concepts.md").read_text()
    text = " ".join(page.lower().split())
    missing = {
        term
        for term in printed_terms()
        if term.lower() not in text and term.lower().replace("_", " ") not in text
    }
    assert not missing, sorted(missing)
