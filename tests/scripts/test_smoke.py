"""Every script runs, with the smallest arguments that it has, and prints what it is for."""

import math
import re
import sys
from importlib import import_module

import pytest
import torch
from compare_commits import differences
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

RESULTS = "--quick --results {0}/runs.jsonl"
PICTURE = RESULTS + " --picture {0}/a.png"
# arguments in a folder {0}, and what is printed
SCRIPTS = {
    "bench_clipping": ("--times logistic --seconds 0.01", '"ours"'),
    "speed": ("optimizers loader kernels --seconds 0.01", r"\| network 3-50-1, N = 2,000 \| "),
    "gpu": ("--seconds 0 --no-checks", "time is up"),
    "recorded_runs": ("{0}/runs.pt --only history:1", ""),
    "compare_samplers": ("--quick", r"\| posteriors SGNHT"),
    "noise_aware_calibration": (f"--cells probit {RESULTS}", r"\| all \| "),
    "noise_aware_tables": (f"--prior-std 3 {RESULTS}", r"\| breast cancer \| \d"),
    "does_bayes_pay": (
        f"table {PICTURE} --csv {{0}}/a.csv",
        r"\| calibrated: NLL below DP-SGD's \| \d of 3",
    ),
    "na_dpvi": (f"--repeats 1 {RESULTS}", r"\| noise_aware.posterior \| "),
    "reproduce_dp_hmc": (f"--figures variance {RESULTS}", r"\| banana \|"),
    "reproduce_renyi_langevin": (PICTURE, "Divergence that FiniteRunLangevin states"),
    "reproduce_privacy_for_free": (f"--repeats 1 {RESULTS}", "Two Gaussians"),
}


@pytest.fixture(autouse=True)
def _with_the_default_dtype():
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs(name, tmp_path, monkeypatch, capsys):
    arguments, printed = SCRIPTS[name]
    script = import_module(name)
    if name == "reproduce_dp_hmc":
        monkeypatch.setattr(script, "EPSILONS", (2.0,))
    given = arguments.format(tmp_path).split()
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *given])
    script.main()
    assert re.search(printed, capsys.readouterr().out)


def test_figures_of_a_page_are_made_once_and_a_failure_does_not_stop_the_others(
    tmp_path, monkeypatch
):
    script, out = import_module("figures"), tmp_path / "speed"
    commands = {"bad": "-c print(1);1/0", "good": "-c print('{root}')"}
    monkeypatch.setitem(script.PAGES, "speed", commands)
    monkeypatch.setattr(script, "DOCS", tmp_path)
    (tmp_path / "speed.md").write_text("version 0.0.9, 2020-01-01 to 2020-02-02\n")
    given = ["speed", "--folder", str(tmp_path), "--data-root", "/a b"]
    assert script.main(given) == 1
    assert (out / "bad.part").read_text().endswith("\n1\n") and not (out / "bad.txt").exists()
    command, printed = (out / "good.txt").read_text().splitlines()
    assert re.fullmatch(r"python -c print\('/a b'\) \(\d+\.\d+\.\d+, 20\d\d-\d\d-\d\d\)", command)
    assert printed == "/a b"
    commands["good"] = "-c 1/0"  # is finished, and not made again
    assert script.main([*given, "--only", "good"]) == 0
    commands["bad"] = "-c 1"
    assert script.main(given) == 0
    assert {path.name for path in out.iterdir()} == {"good.txt", "bad.txt"}


def test_all_programs_of_the_benchmark_pages_exist():
    script = import_module("figures")
    commands = [command for page in script.PAGES.values() for command in page.values()]
    assert all((script.ROOT / command.split()[0]).is_file() for command in commands)


@pytest.mark.parametrize("what", ["affordable", "owners", "acceptance", "chain"])
def test_a_run_of_the_penalty_reproduction(what):
    script = import_module("reproduce_penalty")
    assert script.run(**next(job for job in script.jobs(quick=True) if job["what"] == what))


@pytest.mark.parametrize("normal", [False, True])
@pytest.mark.parametrize("clip", [0.1, 1.0, 100.0])  # all, some and no records are clipped
def test_dp_sgd_of_many_networks_clips_as_opacus_does(clip, normal):
    script = import_module("does_bayes_pay")
    x, y = torch.randn(40, 5), torch.randn(40) if normal else torch.randint(0, 3, (40,))
    nets = [script.network(script.Data(x, y, x, y), normal, seed) for seed in range(2)]
    weights = [torch.stack(both) for both in zip(*(net.parameters() for net in nets), strict=True)]
    sums = script.clipped_sums(weights, x, y, torch.tensor([clip, 0.5]), normal)
    loss = script.gaussian_loss if normal else torch.nn.functional.cross_entropy
    for k, bound in enumerate((clip, 0.5)):
        net = GradSampleModule(nets[k])
        options = {"noise_multiplier": 1.0, "max_grad_norm": bound, "expected_batch_size": 40}
        theirs = DPOptimizer(torch.optim.SGD(net.parameters(), 0.1), **options)
        loss(net(x), y).backward()
        theirs.clip_and_accumulate()
        for ours, p in zip(sums, net.parameters(), strict=True):
            torch.testing.assert_close(ours[k].detach(), p.summed_grad, rtol=1e-4, atol=1e-5)


@pytest.mark.chance(1e-7)
def test_dp_sgd_of_many_networks_adds_the_noise_it_states():
    """Each standard deviation of 40,000 numbers is within 1.8 %, which is 5.1 of its own."""
    weights = torch.zeros(2, 40_000)
    noise, clip, lr = torch.tensor([[2.0, 1.0], [0.7, 3.0], [0.3, 0.1]])
    import_module("does_bayes_pay").descend(weights, 0 * weights, noise * clip, lr / 50)
    assert weights.std(1).tolist() == pytest.approx((lr * noise * clip / 50).tolist(), rel=0.018)


def test_a_comparison_of_two_commits_notices_the_last_bit():
    run = {"p": torch.tensor([0.1, math.nan]), "epsilon": 1.5, "history": "[]"}
    assert differences(run, {**run, "p": run["p"].clone()}) == []
    changed = [{"p": run["p"] * (1 + 2**-23)}, {"p": run["p"].double()}, {"p": run["p"][None]}]
    for change in (*changed, {"epsilon": math.nextafter(1.5, 2)}, {"history": "[1]"}, {"more": 1}):
        (found,) = differences(run, run | change)
        assert found.startswith(next(iter(change)))
    assert differences("ValueError: x", "ValueError: x")  # a run that failed
