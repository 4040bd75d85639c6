"""What the README and the pages in docs/ state: their code runs, their links lead somewhere, and
the errors that they explain exist.
"""

import ast
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
LONGEST = 20_000  # bytes


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def without_code(page):
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def slug(heading):
    """The anchor of a heading, as MyST and GitHub make it."""
    text = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return text.replace(" ", "-")


def anchors(page):
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_resolve(page):
    for target in re.findall(r"\]\(\s*(?!http)([^)\s]+)\s*\)", without_code(page)):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.is_file(), target
        if anchor:
            assert anchor in anchors(linked), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_are_short_and_their_names_exist(page):
    text = page.read_text()
    assert len(text.encode()) <= LONGEST, "split it"
    for name, inner in set(re.findall(r"\bdpb\.([A-Za-z_]+)(?:\.([A-Za-z_]+))?", text)):
        assert hasattr(dpb, name), name
        if inner:
            assert hasattr(getattr(dpb, name), inner), f"{name}.{inner}"
    for path in re.findall(r"\b(?:examples|scripts|tests)/[\w/]+\.(?:py|csv|md|png)\b", text):
        assert (ROOT / path).is_file() or "NAME" in path, path
    for code in blocks(page, "py"):  # those that need what a page does not have
        ast.parse(code)
    if page.name != "CONTRIBUTING.md":
        for line in without_code(page).splitlines():
            assert len(line) <= 100 or line.startswith(("|", "#", "!")) or "](" in line, line


FIGURE = re.compile(r"^(?:[<≤≈+−-]|\*\*)*\d[\d,]*(?:\.\d+)?(?: ?%| ±|\b)")
COMMAND = re.compile(r"`[^`]*(?:scripts/\w+|\w+\.(?:py|csv)|\.ipynb)[^`]*`", re.DOTALL)
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
COMMIT = re.compile(r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,8}\b")


def sections(page):
    """Pairs of the text of a section (of level 2) and that with what stands before the first."""
    first, *others = re.split(r"^(?=## )", without_code(page), flags=re.MULTILINE)
    return [(first, first), *((section, first + section) for section in others)]


def has_figures(section):
    """Whether it has a picture of results or a table with three measured rows."""
    rows = re.findall(r"^\|(.*)\|$", section, re.MULTILINE)
    cells = [[FIGURE.match(cell.strip()) for cell in row.split("|")[1:]] for row in rows]
    return "examples/pictures/" in section or sum(any(row) for row in cells) >= 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_figures_carry_their_command_and_date_and_no_commit(page):
    for section, read in sections(page):
        if has_figures(section):
            title = section.strip().splitlines()[0]
            assert COMMAND.search(read), f"{title}: by which command was it measured?"
            assert DATE.search(read), f"{title}: when was it measured?"
    assert not COMMIT.search(page.read_text()), "a page is of a version, not of a commit"


def test_all_examples_and_notebooks_are_in_the_index():
    index = (ROOT / "docs/examples.md").read_text()
    for program in (ROOT / "examples").glob("*.py"):
        assert program.name in index
    for notebook in (ROOT / "docs/notebooks").glob("*.ipynb"):
        assert f"(notebooks/{notebook.name})" in index


def test_the_readme_is_read_in_one_go():
    assert len(README.read_text().encode()) <= 6000


def test_how_to_pages_are_short_and_so_is_the_documentation():
    for page in (ROOT / "docs/how_to").glob("*.md"):
        assert len(without_code(page).split()) <= 400, page
    words = sum(len(page.read_text().split()) for page in (ROOT / "docs").rglob("*.md"))
    assert words <= 28_000, words


def digits():
    from sklearn.datasets import load_digits  # where it is needed: it takes long

    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)


def small_network():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def logistic_records(n):
    x = F.normalize(torch.randn(n, 2)) * torch.rand(n, 1).sqrt()
    return x, torch.bernoulli(torch.sigmoid(x @ torch.tensor([1.0, -1.0])))


def logistic_model(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def classifier_names():
    x, y = digits()
    return {
        "dpb": dpb,
        "torch": torch,
        "partial": partial,
        "F": F,
        "DataLoader": DataLoader,
        "TensorDataset": TensorDataset,
        "nn": nn,
        "pictures": TensorDataset(torch.rand(64, 3, 32, 32), y[:64]),
        "sentences": TensorDataset(torch.randint(0, 100, (64, 12)), y[:64] % 2),
        "net": small_network(),
        "new_net": small_network,
        "train_set": TensorDataset(x[:1500], y[:1500]),
        "loader": DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=150, shuffle=True),
        "public_loader": DataLoader(TensorDataset(torch.rand(100, 64), y[:100]), batch_size=50),
        "x_test": x[1500:],
        "y_test": y[1500:],
    }


def trained():
    """The names after the README's ten lines."""
    names = classifier_names()
    exec(blocks(README, "python")[0], names)
    return names


def records_names(n=2000):
    pyro.clear_param_store()  # a guide takes nothing over from other tests
    x, y = logistic_records(n)
    return {
        "dpb": dpb,
        "torch": torch,
        "pyro": pyro,
        "dist": dist,
        "model": logistic_model,
        "Trace_ELBO": pyro.infer.Trace_ELBO,
        "AutoNormal": pyro.infer.autoguide.AutoNormal,
        "partial": partial,
        "x": x,
        "y": y,
        "X": x,
        "X_test": x[:100],
    }


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


BEGINNER = """\
import torch_dpbayes as dpb
engine = dpb.PrivacyEngine()
net, opt, loader = engine.make_private_with_epsilon(
    module=net, optimizer=partial(dpb.optim.DPSGLD, lr=0.25), data_loader=loader,
    target_epsilon=3, target_delta=1e-5, epochs=20)
samples = dpb.PosteriorSamples()
for epoch in range(20):
    for x, y in loader:
        opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
    samples.collect(net)
print(engine.accountant.summary(), samples.predict(net, x_test))
"""


def test_the_ten_lines_and_the_six(capsys):
    assert blocks(README, "python")[0] == BEGINNER  # public names are a contract
    names = trained()
    exec(blocks(README, "python")[1], names)
    assert len(names["samples"]) == 10
    probabilities = names["samples"].predict(names["net"], names["x_test"])
    torch.testing.assert_close(probabilities.sum(1), torch.ones(297))
    assert (names["entropy"] >= names["doubt"]).all()
    assert len(dpb.PosteriorSamples.load("samples.pt")) == 10
    accountant = names["engine"].accountant
    assert len(accountant) == 200 and 2.97 < accountant.get_epsilon() <= 3
    assert names["opt"].effective_temperature == pytest.approx(1.0)
    assert accountant.summary() in capsys.readouterr().out


@pytest.mark.slow
def test_the_readmes_short_examples(capsys):
    kernel, noise_aware, draw, ledger = blocks(README, "python")[2:]
    names = records_names()
    exec(kernel, names)
    assert names["mcmc"].get_samples()["w"].shape == (100, 2)
    assert names["kernel"].accountant.get_epsilon() <= 4
    exec(noise_aware, names)
    assert names["posterior"].mean["weights"].shape == (2,)
    exec(draw, names)
    assert names["draw"].shape == (2,)
    exec(ledger, names)
    names["accountant"].close()
    command = [sys.executable, "-m", "torch_dpbayes.accounting", "budget.db"]
    assert "epsilon = 3" in subprocess.run(command, capture_output=True, text=True).stdout


def test_getting_started_from_top_to_bottom():
    names = {}
    for code in blocks(ROOT / "docs/getting_started.md", "python"):
        exec(code, names)
    assert names["engine"].accountant.get_epsilon() <= 5


NAMES = {
    "choosing_a_method.md": partial(records_names, 30_000),
    "coming_from.md": records_names,
    "how_to/audit.md": lambda: {**classifier_names(), "new_net": lambda: nn.Linear(64, 100)},
    "how_to/choose_settings.md": classifier_names,
    "how_to/last_layer.md": classifier_names,
    "how_to/raise_accuracy.md": classifier_names,
    "how_to/share_a_budget.md": trained,
    "how_to/what_epsilon_means.md": lambda: {"dpb": dpb},
    "how_to/tune_privately.md": classifier_names,
    "how_to/show_uncertainty.md": trained,
    "how_to/usual_networks.md": classifier_names,
    "models_and_losses.md": classifier_names,
    "noise_aware.md": records_names,
    "one_posterior_sample.md": records_names,
    "pyro_kernels.md": dict,
}
LONG = ("choosing_a_method.md", "coming_from.md", "noise_aware.md")  # the README's is run daily


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=pytest.mark.slow if p in LONG else ()) for p in NAMES]
)
def test_code_of_the_pages_runs(page):
    codes = blocks(ROOT / "docs" / page, "python")
    assert codes
    names = NAMES[page]()
    for code in codes:
        exec(code, names)


def test_all_code_is_run_or_marked_as_a_part_of_something():
    """``python`` is run above; ``py`` needs a process group, a large data set or a long time."""
    run = {README, ROOT / "CONTRIBUTING.md", ROOT / "docs/getting_started.md"}
    run |= {ROOT / "docs" / page for page in NAMES}
    assert {page for page in PAGES if blocks(page, "python")} == run


NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_small_and_with_a_picture(path):
    text = path.read_text()
    assert len(text) < 100_000 and "image/png" in text
    assert "Traceback" not in text and str(ROOT) not in text and "/tmp/" not in text


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path):
    import matplotlib

    matplotlib.use("Agg")
    names = {}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    matplotlib.pyplot.close("all")
