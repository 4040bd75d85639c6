"""The examples, as people call them; the variants of the main one in this process."""

import importlib.util
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def private_bnn():
    return load_example("private_bnn")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("run"))


def rows(out):
    """The numbers of the two rows of the final table."""
    names = ("posterior average, ", "average of the run", "last iterate")
    found = [line for line in out.splitlines() if line.startswith(names)]
    assert len(found) == 2, out
    return [[float(number) for number in re.findall(r"-?\d+\.\d+", line)] for line in found]


def stated(out, name):
    (line,) = [line for line in out.splitlines() if re.match(rf"{name}  ", line)][-1:]
    return float(line[22:].split()[0])


@pytest.mark.slow
def test_demo_trains_on_digits_and_draws_the_picture(tmp_path):
    picture = tmp_path / "digits.png"
    arguments = ["--epochs", "2", "--epsilon", "3"]
    command = [ROOT / "scripts" / "demo", *arguments]
    # tested in an environment of one's own: don't make another one for it
    if Path(sys.prefix) != ROOT / ".venv":
        command = [sys.executable, ROOT / "examples" / "private_bnn.py", *arguments]
    run = subprocess.run(
        command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr

    for accuracy, likelihood, calibration, outside in rows(run.stdout):
        assert (
            0 <= accuracy <= 100
            and 0 < likelihood < 10
            and 0 <= calibration <= 1
            and 0 <= outside <= 1
        )
    assert 2.9 < stated(run.stdout, "epsilon") <= 3
    assert "z_L" in run.stdout and "seconds" in run.stdout
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000

    lines = [line for line in re.split(r"[\r\n]+", run.stderr) if line]
    said = [line for line in lines if "step/s" not in line]
    assert len(said) == 1 and "now draws Poisson batches" in said[0], run.stderr
    assert re.search(r"epoch 2/2, epsilon [23]\.\d+ spent, 0\.\d+ left: 100%", lines[-1]), lines[-1]


def test_regression_states_its_likelihood(private_bnn, capsys):
    private_bnn.main(["--task", "regression", "--epochs", "3"])
    out = capsys.readouterr().out
    assert "Gaussian, variance 1/2" in out
    for error, likelihood, covered in rows(out):
        assert 0 < error < 500 and 0 < likelihood < 50 and 0 <= covered <= 100
    assert stated(out, "epsilon") <= 5
    assert Path("diabetes.png").read_bytes().startswith(b"\x89PNG")


def test_scattering_features(capsys, monkeypatch, tmp_path):
    plot = tmp_path / "accuracy.png"
    arguments = ["scattering_features.py", "--epsilon", "50", "--epochs", "30", "--plot", str(plot)]
    monkeypatch.setattr(sys, "argv", arguments)
    load_example("scattering_features").main()
    found = re.findall(r"^(\w+ \w+) +accuracy +([\d.]+)", capsys.readouterr().out, re.MULTILINE)
    assert {name for name, _ in found} == {"last iterate", "averaged weights", "posterior average"}
    # the lowest of 36 had .936, and their standard deviation is about .01
    assert min(float(accuracy) for _, accuracy in found) > 0.75 and plot.exists()


@pytest.mark.slow
def test_fine_tuning(capsys):
    arguments = ["--train", "last", "--records", "128", "--epochs", "2"]
    load_example("fine_tuning").main(arguments)
    out = capsys.readouterr().out
    assert out.startswith("66 of 20,194 parameters trained") and "average: " in out


# -- Pyro kernels and one posterior sample ---------------------------------------------------------


def called(name, *arguments, launcher=()):
    command = [sys.executable, *launcher, str(ROOT / "examples" / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_one_accountant_pays_for_the_start_and_the_chain(tmp_path):
    picture = tmp_path / "logistic.png"
    short = "--records 3000 --iterations 12 --steps 2 --epsilon 2 --plot".split()
    out = called("pyro_logistic_regression", *short, str(picture)).stdout
    assert 1.98 < float(re.findall(r"spent +epsilon <= ([\d.]+)", out)[-1]) <= 2
    assert re.search(r"DPSGLD +[\d.]+% of the cost, 200 releases", out)
    assert re.search(r"DPHMC +[\d.]+% of the cost, 37 releases", out)
    assert "without privacy" in out and "8 samples" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one_posterior_sample", "private_mean"])
def test_one_posterior_sample_prints_its_guarantee(name):
    done = called(name, "--records", "300", "--epsilon", "0.7")
    assert done.stderr == "" and "epsilon = 0.7 at delta" in done.stdout
    assert "proved" in done.stdout and "ASSUMED" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 0])
def test_owners_by_torchrun_and_by_the_example_itself(size):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    nodes = ["-m", "torch.distributed.run", "--nproc-per-node", "3", "--master-port", port]
    short = "--records 3000 --iterations 12 --quiet --epsilon 1 2 3".split()
    out = called("multi_owner", *short, launcher=nodes if size else ()).stdout
    line = r"^(\w+) +epsilon = ([\d.]+) at delta = 1e-06, .*mean of the first weight (\S+)$"
    found = {name: (float(e), mean) for name, e, mean in re.findall(line, out, re.MULTILINE)}
    assert sorted(found) == ["Aachen", "Bern", "Cork"]
    assert len({mean for _, mean in found.values()}) == 1
    for budget, name in zip((1, 2, 3), sorted(found)):
        assert 0.99 * budget < found[name][0] <= budget
    assert "8 samples" in out and "no privacy" in out
