"""The public names and their arguments, a line each: ``PYTHONPATH=.:tests python -m
support.public_api > tests/public_api.txt`` writes the snapshot that tests/test_package.py compares.
"""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch_dpbayes as dpb
from torch_dpbayes import accounting
from torch_dpbayes.accounting import events


def arguments(value: Any) -> str:
    """Those of a callable with their defaults, without annotations."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def described(name: str, value: Any) -> Iterator[str]:
    """A line for a value, and for each public member of a class that this library defines."""
    if not inspect.isclass(value):
        yield name + arguments(value)
        return
    bases = ", ".join(base.__name__ for base in value.__bases__)
    yield f"class {name}{arguments(value)} of {bases}"
    ours = [kind for kind in value.__mro__ if kind.__module__.startswith("torch_dpbayes")]
    for key in sorted({key for kind in ours for key in vars(kind) if key[0] != "_"}):
        yield f"    .{key}{arguments(getattr(value, key))}"


def names_of(module: Any) -> list[str]:
    """The public ones; of a module that lists none, those of its classes."""
    classes = inspect.getmembers(module, inspect.isclass)
    own = [name for name, kind in classes if kind.__module__ == module.__name__]
    return sorted(set(getattr(module, "__all__", own)) - {"__version__"})


def lines() -> Iterator[str]:
    """Of the package and of its public modules."""
    known: dict[int, str] = {}
    modules = [("", dpb), ("accounting.", accounting), ("accounting.events.", events)]
    for prefix, module in modules:
        for key in names_of(module):
            value, name = getattr(module, key), prefix + key
            if inspect.ismodule(value):
                modules.append((f"{name}.", value))
            elif id(value) in known:
                yield f"{name} = {known[id(value)]}"
            else:
                known[id(value)] = name
                yield from described(name, value)


if __name__ == "__main__":
    print(*lines(), sep="\n")
