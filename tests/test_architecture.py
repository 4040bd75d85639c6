"""Arrows between rooms run one way, and data are touched where the map says."""

import ast
from collections import defaultdict
from pathlib import Path

import torch_dpbayes

ROOT = Path(torch_dpbayes.__file__).parent

MAY_IMPORT = {
    "errors": set(),
    "accounting": {"errors"},
    "noise": set(),
    "metrics": set(),
    "distributed": {"accounting", "noise"},
    "words": {"accounting"},
    "per_sample": {"noise"},
    "batches": {"accounting", "noise", "per_sample", "distributed"},
    "release": {"accounting", "noise", "distributed", "per_sample", "batches"},
    "optim": {"accounting", "noise", "release", "words"},
    "density": {"noise"},
    "mcmc": {"accounting", "noise", "density", "distributed", "words"},
    "noise_aware": {"accounting", "noise", "density", "ops", "posterior"},
    "infer": {"accounting", "noise", "distributed", "batches", "density", "noise_aware"},
    "posterior": {"accounting", "noise", "distributed", "per_sample", "batches", "words"},
    "frameworks": {"batches", "engine", "optim", "per_sample"},
    "engine": {
        "accounting",
        "noise",
        "distributed",
        "per_sample",
        "batches",
        "release",
        "optim",
        "posterior",
        "words",
    },
    "audit": {"accounting", "batches", "engine", "optim", "per_sample", "release"},
    "ops": {
        "accounting",
        "words",
        "noise",
        "batches",
        "per_sample",
        "optim",
        "density",
        "posterior",
        "engine",
    },
}
# files that may import from a room though theirs as a whole may not
EXCEPTIONS = {("optim/fisher_sum.py", "per_sample")}
# errors are the ground of all
for room in MAY_IMPORT.keys() - {"errors"}:
    MAY_IMPORT[room] = MAY_IMPORT[room] | {"errors"}
TOUCHES_DATA = {"per_sample", "batches"}


def imports_of(path: Path) -> set[str]:
    """Rooms from which a file of the package imports."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - (node.level - 1)]
            full = (*base, *(node.module.split(".") if node.module else ()))
            found |= {full[0]} if full else {alias.name for alias in node.names}
    return found - {"__version__"}  # a constant of the package


def test_arrows_run_one_way():
    arrows = defaultdict(set)
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        room = name.removesuffix(".py").split("/")[0]
        if room in ("__init__",):
            continue
        for other in imports_of(path) - {room}:
            if (name, other) not in EXCEPTIONS:
                arrows[room].add(other)
    assert {room for room in arrows if not arrows[room] <= MAY_IMPORT[room]} == set(), dict(arrows)


def test_the_table_has_no_circle():
    left = dict(MAY_IMPORT)
    while left:
        ground = {room for room, below in left.items() if not below & set(left)}
        assert ground, f"these rooms import each other in a circle: {sorted(left)}"
        left = {room: below for room, below in left.items() if room not in ground}


def test_algorithms_see_no_data():
    for path in (ROOT / "optim").glob("*.py"):
        if path.name != "fisher_sum.py":
            assert not imports_of(path) & TOUCHES_DATA, path.name


def test_every_room_is_on_the_map():
    text = (ROOT.parent / "docs" / "architecture.md").read_text()
    rooms = {
        path.name + ("/" if path.is_dir() else "")
        for path in ROOT.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    } - {"__init__.py"}
    assert {room for room in rooms if f"`{room}`" not in text} == set()


def test_every_file_says_in_a_sentence_what_it_is_for():
    """The site lists them."""
    for path in ROOT.rglob("*.py"):
        says = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
        assert 5 < len(says.split()) < 45, path
