"""Which samples of a run are kept, their file, and ArviZ's structure of several runs."""

import copy
import math
import os
import resource
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn import Table, sampled, walked
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused
from support.training import made_private
from torch import nn

import torch_dpbayes as dpb
from torch_dpbayes import PosteriorSamples

NORMALIZED = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 4))


def kept_of(samples, calls, interrupted_at):
    """The numbers of the calls that are kept, of so many: as if it had not been interrupted."""
    model = Table([0.0])
    for call in range(calls):
        if call == interrupted_at:
            with tempfile.TemporaryDirectory() as folder:
                samples.save(Path(folder) / "samples.pt")
                samples = PosteriorSamples.load(Path(folder) / "samples.pt")
        nn.init.constant_(model.output, call)
        samples.collect(model)
    assert samples.num_collected == calls and len(samples) <= samples.max_samples
    zero = torch.zeros(1, dtype=torch.long)
    return samples, [int(s) for s in samples.outputs(model, zero)] if len(samples) else []


calls = st.integers(1, 100)


@given(st.integers(0, 9), st.integers(1, 4), st.integers(2, 7), calls, calls)
def test_kept_calls_are_evenly_spaced_and_bounded(burn_in, thin, max_samples, calls, at):
    samples, spacing = PosteriorSamples(None, burn_in, thin, max_samples), thin
    samples, kept = kept_of(samples, calls, at)
    # the smallest doubling that fits: not how the implementation gets there
    while len(range(burn_in, calls, spacing)) > max_samples:
        spacing *= 2
    assert kept == list(range(burn_in, calls, spacing)) and samples.thin == spacing


@given(st.integers(1, 4), st.integers(2, 9), calls, calls)
def test_without_burn_in_the_second_half_is_kept(thin, max_samples, calls, at):
    """Evenly spaced, over the last half of the calls to within two spacings, and as many as fit."""
    samples, kept = kept_of(PosteriorSamples(None, None, thin, max_samples), calls, at)
    doublings = math.log2(samples.thin / thin)
    assert doublings == int(doublings)
    assert kept == list(range(kept[0], calls, samples.thin)) and kept[0] % samples.thin == 0
    due = len(range(0, calls, samples.thin))
    assert len(kept) == due - due // 2
    if doublings:  # half as many would have left room
        assert len(kept) >= max_samples // 2


def test_what_is_no_sample_is_refused_and_not_counted():
    samples, linear = PosteriorSamples(burn_in=0), nn.Linear(2, 3)
    samples.collect(linear)
    frozen = nn.Linear(2, 3).requires_grad_(False)
    for other in (frozen, nn.Linear(4, 3), nn.Sequential(linear)):
        with refused("samples"):
            samples.collect(other)
    nn.init.constant_(linear.bias, math.nan)
    with refused("diverged"):
        samples.collect(linear)
    assert len(samples) == samples.num_collected == 1


def test_buffers_that_changed_are_refused():
    """They carry records without noise; a cast changes nothing."""
    since_private = nn.Sequential(*copy.deepcopy(NORMALIZED))
    since_private._dpbayes_buffers = {n: b.clone() for n, b in since_private.named_buffers()}
    since_first = nn.Linear(2, 2)
    since_first.register_buffer("scale", torch.tensor([1.0, math.nan]))
    first, other = PosteriorSamples(burn_in=0), PosteriorSamples(burn_in=0)
    first.collect(since_private)
    other.collect(since_first)
    since_private.eval()(torch.randn(5, 1, 4, 4))
    first.collect(since_private.double())
    since_private.train()(torch.randn(5, 1, 4, 4).double())
    since_first.scale[0] = 2
    for model, samples in (
        (since_private, first),
        (since_private, PosteriorSamples()),  # even if nothing was collected before
        (since_first, other),
    ):
        with refused("model-buffer"):
            samples.collect(model)
    with refused("model-buffer"):  # nor do they leave with predictions, or a checkpoint
        first.predict(since_private.eval(), torch.randn(5, 1, 4, 4).double())
    with refused("model-buffer"):
        dpb.PrivacyEngine().save_checkpoint(os.devnull, module=since_private, optimizer=None)
    since_first.scale[0] = 1
    other.collect(since_first)
    since_first.register_buffer("added", torch.zeros(()))
    with refused("model-buffer"):
        other.collect(since_first)
    assert len(first) == len(other) == 2


def test_what_no_step_has_changed_is_no_sample():
    net, opt, loader = made_private()
    samples = PosteriorSamples()
    with refused("state"):
        samples.collect(net)
    x, y = next(iter(loader))  # a part of a draw may come first
    samples.collect(net)
    opt.zero_grad()
    nn.functional.mse_loss(net(x), y).backward()
    opt.step()
    samples.collect(net)
    PosteriorSamples().collect(copy.deepcopy(net))
    assert samples.num_collected == 2


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise_std", [np.float64(0.5), torch.tensor(0.5), 0.5])
def test_a_file_holds_tensors_and_plain_numbers(noise_std, tmp_path):
    """It is written through a link, with the usual permissions, and no other file is left."""
    samples, model, x = sampled(torch.randn(3, 4), "normal", noise_std=noise_std)
    (tmp_path / "plain").touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    samples.save(str(tmp_path / "link"))
    assert sorted(os.listdir(tmp_path)) == ["link", "plain", "target"]
    assert (tmp_path / "target").stat().st_mode == (tmp_path / "plain").stat().st_mode
    torch.load(tmp_path / "link", weights_only=True)
    loaded = PosteriorSamples.load(tmp_path / "link")
    assert (loaded.likelihood, loaded.noise_std, loaded.burn_in) == ("normal", 0.5, 0)
    entropies = loaded.predictive_entropy(model, x)
    assert torch.equal(entropies, samples.predictive_entropy(model, x))
    with pytest.raises(dpb.DPBayesError):
        loaded.collect(nn.Linear(2, 2))


def test_a_failed_save_leaves_the_older_file_alone(tmp_path):
    path = tmp_path / "samples.pt"
    walked(nn.Linear(2, 2))[0].save(path)
    content, (new, _) = path.read_bytes(), walked(nn.Linear(200, 200))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # the write fails half-way, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises((OSError, RuntimeError)):
            new.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path) == ["samples.pt"] and path.read_bytes() == content


class Runs:
    """Whoever unpickles it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_wrong_files(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        PosteriorSamples.load(path)
    samples, _ = walked(nn.Linear(2, 2))
    samples.save(path)
    whole, content = path.read_bytes(), torch.load(path, weights_only=True)
    others = [Runs(tmp_path / "ran"), [1, 2], {**content, "format": "another"}]
    others += [{name: content[name] for name in content if name != gone} for gone in content]
    for other in (*others, whole[: len(whole) // 2], b"", b"text"):
        if isinstance(other, bytes):
            path.write_bytes(other)
        else:
            torch.save(other, path)
        with refused("checkpoint"):
            PosteriorSamples.load(path)
    assert not (tmp_path / "ran").exists()


# -- ArviZ -----------------------------------------------------------------------------------------


def test_every_parameter_under_its_own_name():
    model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)).to(torch.bfloat16)
    chains, states = zip(*[walked(copy.deepcopy(model)) for _ in range(3)])
    data = chains[0].to_arviz(*chains[1:])["posterior"]
    assert sorted(data.data_vars) == sorted(name for name, _ in model.named_parameters())
    for name in data.data_vars:
        assert data[name].dims[:2] == ("chain", "draw") and data[name].dtype == np.float32
        expected = [[state[name].float().numpy() for state in of_chain] for of_chain in states]
        assert np.array_equal(data[name].values, np.array(expected))


def test_chains_that_cannot_be_compared():
    first = sampled(torch.randn(6, 2))[0]
    for other in (
        [first],
        PosteriorSamples(),
        sampled(torch.randn(6, 3))[0],
        sampled(torch.randn(5, 2))[0],
        walked(Table([0.0, 0.0]), 12, thin=2)[0],
    ):
        with refused("samples"):
            first.to_arviz(other)
    taken, _ = walked(nn.ParameterDict({"draw": nn.Parameter(torch.zeros(2))}))
    with pytest.raises(dpb.DPBayesError):
        taken.to_arviz()
