"""Every example runs, with small arguments, and prints what it is for."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ONE_SAMPLE = ("--records 300 --epsilon 0.7", [r"epsilon = 0\.7 at delta", "proved"])
# arguments, and what is printed
EXAMPLES = {
    "private_bnn": (
        "--task regression --epochs 3 --plot a.png",
        ["Gaussian, variance 1/2", r"\nepsilon +(4\.9\d*|5) ", r"\nposterior average, .*\d\.\d+"],
    ),
    "scattering_features": (
        "--epsilon 50 --epochs 30 --plot a.png",
        # the lowest of 36 had .936, and their standard deviation is about .01
        [rf"{name} \| (7[5-9]|[89]\d)\." for name in ("iterate", "weights", "predictions")],
    ),
    "fine_tuning": (
        "--train last --records 128 --epochs 2",
        ["66 of 20,194 parameters trained", "average: "],
    ),
    "pyro_logistic_regression": (
        "--records 3000 --iterations 12 --steps 2 --epsilon 2 --plot a.png",
        [
            r"spent +epsilon <= (1\.9[89]|2)",
            r"DPSGLD +[\d.]+% of the cost, 200 releases",
            r"DPHMC +[\d.]+% of the cost, 37 releases",
            "8 samples",
        ],
    ),
    "one_posterior_sample": ONE_SAMPLE,
    "private_mean": ONE_SAMPLE,
}
DAILY = ("private_bnn", "scattering_features")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in DAILY else pytest.mark.slow) for n in EXAMPLES]
)
def test_an_example_runs(name, tmp_path, monkeypatch, capsys):
    arguments, printed = EXAMPLES[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments.split()])
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    module.main()
    out = capsys.readouterr().out
    for text in printed:
        assert re.search(text, out), (text, out)
    assert "ASSUMED" not in out
    if "--plot" in arguments:
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def ran(name, arguments, size):
    """What the example prints, by torchrun where it has a ``size``."""
    nodes = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command = [sys.executable, *(nodes if size else ()), f"examples/{name}.py", *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_ranks_train_by_torchrun():
    out = ran("distributed_bnn", "--epochs 4 --epsilon 3", 2)
    assert out.count("ranks                 2") == 1
    assert re.search(r"epsilon +(2\.9\d*|3)", out), out


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 0])
def test_owners_by_torchrun_and_by_the_example_itself(size):
    out = ran("multi_owner", "--records 3000 --iterations 12 --quiet --epsilon 1 2 3", size)
    line = r"^(\w+) +epsilon = ([\d.]+) at delta = 1e-06, .*mean of the first weight (\S+)$"
    found = {n: (float(e), mean) for n, e, mean in re.findall(line, out, re.MULTILINE)}
    assert sorted(found) == ["Aachen", "Bern", "Cork"]
    assert len({mean for _, mean in found.values()}) == 1
    for budget, name in zip((1, 2, 3), sorted(found)):
        assert 0.99 * budget < found[name][0] <= budget
    assert "8 samples" in out and "no privacy" in out
