"""Arrows between rooms run one way, so that data are touched where the map says."""

import ast
from collections import defaultdict
from graphlib import TopologicalSorter

from support.sources import ROOT, trees

MAY_IMPORT = {
    "errors": "",
    "processes": "errors",
    "accounting": "",
    "noise": "",
    "metrics": "",
    "distributed": "accounting noise",
    "words": "accounting",
    "per_sample": "noise",
    "batches": "accounting noise distributed per_sample",
    "release": "accounting noise distributed per_sample batches",
    "optim": "accounting noise release words",
    "density": "noise per_sample",
    "mcmc": "accounting noise distributed density words",
    "noise_aware": "accounting noise per_sample density ops posterior",
    "infer": "accounting noise distributed batches density noise_aware",
    "posterior": "accounting noise distributed per_sample batches words",
    "frameworks": "per_sample batches optim engine",
    "engine": "accounting noise distributed per_sample batches release optim posterior words",
    "audit": "accounting per_sample batches release optim engine",
    "ops": "accounting noise per_sample batches optim density posterior engine words",
}
# files that may import from a room though theirs as a whole may not
EXCEPTIONS = {("optim/sgfs.py", "per_sample")}
GROUND = {"errors", "processes"}  # of all
MAY_IMPORT = {
    room: {*below.split(), *(GROUND if room not in GROUND else ())}
    for room, below in MAY_IMPORT.items()
}


def imports_of(name: str, tree: ast.Module) -> set[str]:
    """Rooms from which a file of the package imports."""
    package = name.split("/")[:-1]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - (node.level - 1)]
            full = (*base, *(node.module.split(".") if node.module else ()))
            found |= {full[0]} if full else {alias.name for alias in node.names}
    return found - {"__version__"}  # a constant of the package


def test_arrows_run_one_way():
    arrows = defaultdict(set)
    for name, tree in trees().items():
        room = name.removesuffix(".py").split("/")[0]
        others = imports_of(name, tree) - {room} if room != "__init__" else ()
        arrows[room] |= {other for other in others if (name, other) not in EXCEPTIONS}
    wrong = {room: found - MAY_IMPORT.get(room, set()) for room, found in arrows.items()}
    assert not any(wrong.values()), wrong


def test_the_table_has_no_circle():
    TopologicalSorter(MAY_IMPORT).prepare()


def test_every_room_is_on_the_map():
    text = (ROOT.parent / "docs" / "architecture.md").read_text()
    folders = {f"`{path.parent.name}/`" for path in ROOT.glob("*/__init__.py")}
    files = {f"`{path.name}`" for path in ROOT.glob("*.py")} - {"`__init__.py`"}
    assert {room for room in folders | files if room not in text} == set()


def test_every_file_says_in_a_sentence_what_it_is_for():
    """The site lists them."""
    for name, tree in trees().items():
        says = (ast.get_docstring(tree) or "").split("\n\n")[0]
        assert 5 < len(says.split()) < 45, name
