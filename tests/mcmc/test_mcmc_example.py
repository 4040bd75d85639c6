"""The examples of Pyro kernels and of one posterior sample, as people call them."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def called(name, *arguments, launcher=()):
    command = [sys.executable, *launcher, str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLES.parent, timeout=600)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.thorough
def test_one_accountant_pays_for_the_start_and_the_chain(tmp_path):
    picture = tmp_path / "logistic.png"
    short = "--records 3000 --iterations 12 --steps 2 --epsilon 2 --plot".split()
    out = called("pyro_logistic_regression", *short, str(picture)).stdout
    assert 1.98 < float(re.findall(r"spent +epsilon <= ([\d.]+)", out)[-1]) <= 2
    assert re.search(r"DPSGLD +[\d.]+% of the cost, 200 releases", out)
    assert re.search(r"DPHMC +[\d.]+% of the cost, 37 releases", out)
    assert "without privacy" in out and "8 samples" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
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
