"""The package as a whole: lazy names that exist, a complete wheel, and a skeleton for
contributors that works.
"""

import ast
import math
import os
import re
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
from opacus.grad_sample import GradSampleHooks
from support import public_api

import torch_dpbayes as dpb

ROOT = Path(__file__).resolve().parent.parent


def test_import_loads_nothing_heavy():
    program = "import sys, torch_dpbayes\ndir(torch_dpbayes)\nprint(*sys.modules)"
    command = [sys.executable, "-c", program]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "opacus", "pyro", "numpy", "scipy", "dp_accounting", "tqdm"} & {*loaded}


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(dpb.__file__).read_text())
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(guarded.test) == "TYPE_CHECKING"
    imported = {alias.asname for node in guarded.body for alias in node.names}
    assert imported == set(dpb.__all__) - {"__version__"}


@pytest.mark.slow
def test_the_archives_hold_the_package_its_pages_and_no_tests(tmp_path):
    """``scripts/release.py`` looks into them; a release also installs them and tries them."""
    command = [sys.executable, ROOT / "scripts/release.py", "--to", tmp_path]
    url = "https://example.org/project"
    subprocess.run([*command, "--url", url], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    built = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in built.namelist() if name.endswith("/METADATA"))
    text = built.read(metadata).decode()
    assert f"Project-URL: Source, {url}\n" in text
    links = re.findall(r"\]\((?!#)([^)\s]+)\)", text)
    assert len(links) > 3 and not [link for link in links if not link.startswith("http")]
    assert any(name.endswith("LICENSE") for name in built.namelist())


@pytest.mark.slow
def test_what_tries_an_installed_release_runs_here():
    command = [sys.executable, "-W", "ignore", ROOT / "scripts/smoke.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0 and "it works" in ran.stdout, ran.stderr


def test_public_names_and_arguments_are_those_of_the_snapshot():
    """CONTRIBUTING.md says how to write it anew."""
    assert list(public_api.lines()) == (ROOT / "tests/public_api.txt").read_text().splitlines()


def test_the_citation_is_of_this_version():
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {dpb.__version__}\n" in text
    assert f"## [{dpb.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def of_contributing(number):
    """What a Python block of CONTRIBUTING.md defines."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    source = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[number]
    names = {"__name__": "torch_dpbayes.optim.example", "__package__": "torch_dpbayes.optim"}
    exec(source, names)
    return names


def test_the_skeleton_for_contributors_is_a_working_sampler():
    skeleton = of_contributing(0)
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.randn(8, 1, dtype=torch.float64)
    private, plain = (torch.nn.Linear(3, 1, dtype=torch.float64) for _ in range(2))
    plain.load_state_dict(private.state_dict())
    GradSampleHooks(private)
    constants = {"num_data": 8, "expected_batch_size": 8, "max_grad_norm": 1e6}
    constants["assume_independent_records"] = True
    cold = {"temperature": 0.0, "prior_std": math.inf}
    sampler = skeleton["DPExample"](private.parameters(), lr=0.1, **cold, **constants)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        for net, optimizer in ((private, sampler), (plain, sgd)):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
    torch.testing.assert_close(
        dict(private.named_parameters()), dict(plain.named_parameters()), rtol=1e-9, atol=1e-12
    )

    warm = skeleton["DPExample"](private.parameters(), lr=0.1, noise_multiplier=0.5, **constants)
    temperature = 0.1 * 8 * (0.5 * 1e6 / 8) ** 2 / (2 * (1 - 0.9))
    assert warm.effective_temperature == pytest.approx(temperature)
    warm.param_groups[0]["lr"] = warm.free_lr
    assert warm.langevin_noise_multiplier == pytest.approx(0.5)
    assert warm.effective_temperature == pytest.approx(1.0)


def test_the_release_for_contributors_clips_and_charges_first(monkeypatch):
    release = partial(of_contributing(1)["noisy_mean"], noise_multiplier=4.0, num_data=10)
    xi = torch.tensor([0.5, -0.25], dtype=torch.float64)
    drawn = []
    noise = "torch_dpbayes.noise.GaussianNoise.standard_normal"
    monkeypatch.setattr(noise, lambda self, size, **options: drawn.append(size) or xi)
    rows = torch.tensor([[3.0, 4.0], [0.6, 0.0], [math.nan, 1.0], [math.inf, 0.0]])
    accountant = dpb.PrivacyAccountant(epsilon=2.0, delta=1e-5)
    found = release(rows, accountant, max_norm=1.0)
    expected = (torch.tensor([1.2, 0.8], dtype=torch.float64) + 4 * xi) / 10
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)
    assert accountant.history[0].event.noise_multiplier == 4.0
    with pytest.raises(dpb.PrivacyBudgetExceeded):
        for _ in range(9):
            release(rows, accountant, max_norm=1.0)
    assert len(drawn) == len(accountant)
    monkeypatch.undo()  # images are clipped as a whole, and each pixel has its own noise
    images, own = torch.full((1, 4, 4), 100.0), dpb.PrivacyAccountant()
    found = release(images, own, max_norm=1.0)
    assert found.shape == (16,) and len(set(found.tolist())) == 16
