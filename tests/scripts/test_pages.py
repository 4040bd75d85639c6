"""What the README and the pages in docs/ state: their code runs, their links lead somewhere, and
the errors that they explain exist.
"""

import ast
import json
import re
import subprocess
import sys
from functools import cache, partial
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
DOCS, README = ROOT / "docs", ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(DOCS.rglob("*.md"))]
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
LONGEST = 20_000  # bytes

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def without_code(page):
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """Of headings, as MyST and GitHub make them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings}


@every_page
def test_links_resolve(page):
    for target in re.findall(r"\]\(\s*(?!http)([^)\s]+)\s*\)", without_code(page)):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.is_file(), target
        if anchor:
            assert anchor in anchors(linked), target


@every_page
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


@every_page
def test_figures_carry_their_command_and_date_and_no_commit(page):
    for section, read in sections(page):
        if has_figures(section):
            title = section.strip().splitlines()[0]
            assert COMMAND.search(read), f"{title}: by which command was it measured?"
            assert DATE.search(read), f"{title}: when was it measured?"
    assert not COMMIT.search(page.read_text()), "a page is of a version, not of a commit"


def test_all_examples_and_notebooks_are_in_the_index():
    index = (DOCS / "examples.md").read_text()
    assert all(program.name in index for program in (ROOT / "examples").glob("*.py"))
    assert all(f"(notebooks/{path.name})" in index for path in NOTEBOOKS)


def test_the_readme_how_to_pages_and_the_documentation_are_short():
    assert len(README.read_text().encode()) <= 6000
    for page in (DOCS / "how_to").glob("*.md"):
        assert len(without_code(page).split()) <= 400, page
    words = sum(len(page.read_text().split()) for page in DOCS.rglob("*.md"))
    assert words <= 28_000, words


# -- their code runs -------------------------------------------------------------------------------


def model(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def records(n=2000):
    """Of a logistic regression."""
    pyro.clear_param_store()  # a guide takes nothing over from other tests
    x = F.normalize(torch.randn(n, 2)) * torch.rand(n, 1).sqrt()
    y = torch.bernoulli(torch.sigmoid(x @ torch.tensor([1.0, -1.0])))
    return {"x": x, "y": y, "X": x, "X_test": x[:100], "x_test": x[:100]}


def digits():
    """Networks and loaders of 1,797 pictures."""
    from sklearn.datasets import load_digits  # where it is needed: it takes long

    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
    train_set = TensorDataset(x[:1500], y[:1500])

    def new_net():
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    return {
        "pictures": TensorDataset(torch.rand(64, 3, 32, 32), y[:64]),
        "sentences": TensorDataset(torch.randint(0, 100, (64, 12)), y[:64] % 2),
        "net": new_net(),
        "new_net": new_net,
        "train_set": train_set,
        "loader": DataLoader(train_set, batch_size=150, shuffle=True),
        "public_loader": DataLoader(
            TensorDataset(torch.rand(100, 64), y[:100].clone()), batch_size=50
        ),
        "x_test": x[1500:],
        "y_test": y[1500:],
    }


USUAL = {
    **{"dpb": dpb, "torch": torch, "nn": nn, "F": F, "partial": partial, "pyro": pyro},
    **{"DataLoader": DataLoader, "TensorDataset": TensorDataset, "dist": dist, "model": model},
    **{"Trace_ELBO": pyro.infer.Trace_ELBO, "AutoNormal": pyro.infer.autoguide.AutoNormal},
}


def run(codes, names):
    """The names after these pieces of code; those that are given none import all they need."""
    names = {**USUAL, **names} if names else {}
    for code in codes:
        exec(code, names)
    return names


@cache
def trained():
    """The names after the README's ten lines, whose objects several pages go on with."""
    return run(blocks(README, "python")[:1], digits())


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


BEGINNER = """\
import torch_dpbayes as dpb
engine = dpb.PrivacyEngine()
net, opt, loader = engine.make_private_with_epsilon(
    module=net, optimizer=partial(dpb.optim.DPSGLD, lr=0.5), data_loader=loader,
    target_epsilon=3, target_delta=1e-5, epochs=20)
samples = dpb.PosteriorSamples()
for epoch in range(20):
    for x, y in loader:
        opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
    samples.collect(net)
print(engine.accountant.summary(), samples.predict(net, x_test))
"""


def test_the_ten_lines_and_the_six(capsys):
    ten, six, *_ = blocks(README, "python")
    assert ten == BEGINNER  # public names are a contract
    names = run([ten, six], digits())
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
def test_the_readmes_short_examples():
    names = run(blocks(README, "python")[2:], records())
    assert names["mcmc"].get_samples()["w"].shape == (100, 2)
    assert names["kernel"].accountant.get_epsilon() <= 4
    assert names["posterior"].mean["weights"].shape == names["draw"].shape == (2,)
    names["accountant"].close()
    command = [sys.executable, "-m", "torch_dpbayes.accounting", "budget.db"]
    assert "epsilon = 3" in subprocess.run(command, capture_output=True, text=True).stdout


def test_getting_started_from_top_to_bottom():
    names = run(blocks(DOCS / "getting_started.md", "python"), {})
    assert names["engine"].accountant.get_epsilon() <= 5


NAMES = {
    "choosing_a_method.md": partial(records, 30_000),
    "coming_from.md": records,
    "how_to/audit.md": lambda: {**digits(), "new_net": lambda: nn.Linear(64, 100)},
    "how_to/choose_settings.md": digits,
    "how_to/last_layer.md": digits,
    "how_to/raise_accuracy.md": digits,
    "how_to/share_a_budget.md": trained,
    "how_to/what_epsilon_means.md": lambda: {"dpb": dpb},
    "how_to/show_uncertainty.md": trained,
    "how_to/usual_networks.md": digits,
    "models_and_losses.md": digits,
    "noise_aware.md": records,
    "one_posterior_sample.md": records,
    "pyro_kernels.md": dict,
}
LONG = ("choosing_a_method.md", "coming_from.md", "noise_aware.md")  # the README's is run daily


@pytest.mark.filterwarnings("ignore:the two halves of the samples")  # as a page says
@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=pytest.mark.slow if p in LONG else ()) for p in NAMES]
)
def test_code_of_the_pages_runs(page):
    codes = blocks(DOCS / page, "python")
    assert codes
    run(codes, NAMES[page]())


def test_all_code_is_run_or_marked_as_a_part_of_something():
    """``python`` is run above; ``py`` needs a process group, a large data set or a long time."""
    are_run = {README, ROOT / "CONTRIBUTING.md", DOCS / "getting_started.md"}
    assert {page for page in PAGES if blocks(page, "python")} == are_run | {DOCS / p for p in NAMES}


def test_notebooks_are_kept_small_and_with_a_picture():
    for path in NOTEBOOKS:
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
