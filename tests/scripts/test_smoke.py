"""Every script runs, with the smallest arguments that it has, and prints what it is for."""

import re
import sys
from importlib import import_module

import pytest
import torch
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

# script: arguments in a folder {0}, what is made smaller, what it prints
SCRIPTS = {
    "bench_clipping": ("--times logistic --seconds 0.01", {}, '"ours"'),
    "speed": ("optimizers loader kernels --seconds 0.01", {}, r"network 3-50-1, N = 2,000, terms"),
    "gpu": ("--seconds 0 --no-checks", {}, "time is up"),
    "recorded_runs": ("{0}/runs.pt --only history:1", {}, ""),
    "compare_samplers": ("--quick", {}, r"\| posteriors SGNHT"),
    "does_bayes_pay": (
        "table --quick --results {0}/runs.jsonl --csv {0}/a.csv --picture {0}/a.png",
        {},
        r"\| breast cancer \| 8 \| ours, average, calibrated",
    ),
    "na_dpvi": (
        "--quick --repeats 1 --results {0}/runs.jsonl",
        {},
        r"\| noise_aware.posterior \| ",
    ),
    "reproduce_dp_hmc": (
        "--quick --figures variance --results {0}/runs.jsonl",
        {"EPSILONS": (2.0,)},
        r"\| banana \|",
    ),
    "reproduce_renyi_langevin": (
        "--quick --results {0}/runs.jsonl --picture {0}/a.png",
        {},
        "Divergence that FiniteRunLangevin states",
    ),
    "reproduce_privacy_for_free": (
        "--quick --repeats 1 --results {0}/runs.jsonl",
        {},
        "Two Gaussians",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs(name, tmp_path, monkeypatch, capsys):
    arguments, smaller, printed = SCRIPTS[name]
    script = import_module(name)
    for constant, value in smaller.items():
        monkeypatch.setattr(script, constant, value)
    given = arguments.format(tmp_path).split()
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *given])
    script.main()
    assert re.search(printed, capsys.readouterr().out)


@pytest.mark.parametrize("what", ["affordable", "owners", "acceptance", "chain"])
def test_a_run_of_the_penalty_reproduction(what):
    script = import_module("reproduce_penalty")
    assert script.run(**next(job for job in script.jobs(quick=True) if job["what"] == what))


@pytest.mark.parametrize("normal", [False, True])
@pytest.mark.parametrize("clip", [0.1, 1.0, 100.0])  # all, some and no records are clipped
def test_dp_sgd_of_many_networks_clips_as_opacus_does(clip, normal):
    script = import_module("does_bayes_pay")
    x, y = torch.randn(40, 5), torch.randint(0, 3, (40,))
    y = torch.randn(40) if normal else y
    data = script.Data(x, y, x, y)
    nets = [script.network(data, normal, seed) for seed in range(2)]
    weights = [torch.stack(both) for both in zip(*(net.parameters() for net in nets), strict=True)]
    sums = script.clipped_sums(weights, x, y, torch.tensor([clip, 0.5]), normal)
    for k, (net, bound) in enumerate(zip(nets, (clip, 0.5), strict=True)):
        net = GradSampleModule(net)
        theirs = DPOptimizer(
            torch.optim.SGD(net.parameters(), 0.1),
            noise_multiplier=1.0,
            max_grad_norm=bound,
            expected_batch_size=40,
        )
        loss = script.gaussian_loss if normal else torch.nn.functional.cross_entropy
        loss(net(x), y).backward()
        theirs.clip_and_accumulate()
        for ours, p in zip(sums, net.parameters(), strict=True):
            torch.testing.assert_close(ours[k].detach(), p.summed_grad, rtol=1e-4, atol=1e-5)


@pytest.mark.chance(1e-7)
def test_dp_sgd_of_many_networks_adds_opacus_noise():
    """Each standard deviation of 40,000 numbers is within 1.8 %, which is 5.1 of its own."""
    script = import_module("does_bayes_pay")
    p = torch.nn.Parameter(torch.zeros(40_000))
    theirs = DPOptimizer(
        torch.optim.SGD([p], 0.3), noise_multiplier=2.0, max_grad_norm=0.7, expected_batch_size=50
    )
    p.grad_sample = torch.zeros(1, 40_000)
    theirs.clip_and_accumulate()
    theirs.add_noise()
    theirs.scale_grad()
    theirs.original_optimizer.step()
    ours = torch.zeros(2, 40_000)
    noise, clip, lr = torch.tensor([[2.0, 1.0], [0.7, 3.0], [0.3, 0.1]])
    script.descend(ours, torch.zeros(2, 40_000), noise * clip, lr / 50)
    for found, std in ((p, 0.3), (ours[0], 0.3), (ours[1], 0.1 * 3 / 1.4)):
        assert found.std().item() == pytest.approx(std * 1.4 / 50, rel=0.018)
