"""Tries an installed torch_dpbayes, in half a minute: ``python scripts/smoke.py``.

It uses public names alone and nothing else of the repository: ``scripts/release.py`` runs it in an
environment that has only the wheel, or only the source distribution, and what they depend on.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb


def train_a_network(ledger: Path) -> None:
    x = torch.randn(400, 4)
    y = (x[:, 0] > 0).long()
    engine = dpb.PrivacyEngine(dpb.PrivacyAccountant(3.0, 1e-5, path=ledger))
    net, opt, loader = engine.make_private_with_epsilon(
        module=nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)),
        optimizer=partial(dpb.optim.DPSGLD, lr=0.2),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=40),
        max_grad_norm=1.0,
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=3,
    )
    samples = dpb.PosteriorSamples("categorical")
    for _ in range(3):
        for inputs, labels in loader:
            opt.zero_grad()
            F.cross_entropy(net(inputs), labels).backward()
            opt.step()
        samples.collect(net)
    assert samples.predict(net, x[:5]).shape == (5, 2)
    assert 0 < engine.get_epsilon() <= 3.0
    engine.accountant.close()
    command = [sys.executable, "-m", "torch_dpbayes.accounting", str(ledger)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "epsilon = 3" in ran.stdout, ran.stdout


def model(y: torch.Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def run_a_chain() -> None:
    kernel = dpb.mcmc.DPPenalty(
        model,
        proposal_scale=0.1,
        log_ratio_slope=1.0,
        noise_multiplier=20.0,
        accountant=dpb.PrivacyAccountant(4.0, 1e-6),
    )
    chain = pyro.infer.MCMC(kernel, num_samples=10, warmup_steps=5, disable_progbar=True)
    chain.run(torch.randn(200))
    assert chain.get_samples()["mean"].shape == (10,)


def draw_once() -> None:
    x, y = F.normalize(torch.randn(200, 2)), (torch.rand(200) < 0.5).float()
    glm = dpb.ops.GLM("bernoulli", prior_std=0.5, max_feature_norm=1.0)
    draw = dpb.ops.OnePosteriorSample(glm, epsilon=1.0, delta=1e-5).sample(x, y)
    assert draw["weights"].shape == (2,)


def main() -> None:
    home = Path(dpb.__file__).resolve().parent
    print(f"torch_dpbayes {dpb.__version__} in {home}")
    assert (home / "py.typed").is_file()
    with tempfile.TemporaryDirectory() as folder:
        train_a_network(Path(folder) / "budget.db")
    run_a_chain()
    draw_once()
    print("trained, sampled, drew: it works")


if __name__ == "__main__":
    main()
