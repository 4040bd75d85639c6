"""The public names and their arguments, a line each: ``PYTHONPATH=.:tests python -m
support.public_api > tests/public_api.txt`` writes the snapshot that tests/test_package.py compares.
"""

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch_dpbayes as dpb

MODULES = [
    name for name in dpb.__all__ if name != "__version__" and inspect.ismodule(getattr(dpb, name))
]
MODULES += ["accounting", "accounting.events"]


def arguments(value: Any) -> str:
    """Those of a callable with their defaults, without annotations."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("torch_dpbayes")


def described(name: str, value: Any, seen: dict[type, set[str]]) -> Iterator[str]:
    """A line for a value; of a class those of its bases that this library defines come first, once,
    and a line for each public member that they do not have with the same arguments: torch sets
    ``step`` anew on the class of each optimizer that is made.
    """
    if not inspect.isclass(value):
        yield name + (arguments(value) if callable(value) else "")
        return
    if value in seen:  # the base of another
        yield f"{name} = {value.__name__}"
    for kind in reversed([kind for kind in value.__mro__ if is_ours(kind) and kind not in seen]):
        known = set().union(*(seen.get(base, set()) for base in kind.__mro__[1:]))
        seen[kind] = set()
        bases = ", ".join(base.__name__ for base in kind.__bases__ if base is not object)
        label = name if kind is value else kind.__name__
        yield f"class {label}{arguments(kind)}" + (f" of {bases}" if bases else "")
        for key in sorted(key for key in vars(kind) if key[0] != "_"):
            member = inspect.getattr_static(kind, key)
            if isinstance(member, classmethod | staticmethod):
                member = getattr(kind, key)
            line = f"    .{key}" + (arguments(member) if callable(member) else "")
            seen[kind].add(line)
            if line not in known:
                yield line


def lines() -> Iterator[str]:
    """Of the package and of its public modules."""
    names: dict[int, str] = {}
    seen: dict[type, set[str]] = {}
    for name in sorted(set(dpb.__all__) - {"__version__"}):
        value = getattr(dpb, name)
        if not inspect.ismodule(value):
            names[id(value)] = name
            yield from described(name, value, seen)
    modules = sorted(MODULES)
    for name in modules:
        module = import_module(f"torch_dpbayes.{name}")
        found = getattr(module, "__all__", None)
        if found is None:
            found = [
                key
                for key, value in vars(module).items()
                if getattr(value, "__module__", "") == module.__name__ and inspect.isclass(value)
            ]
        for key in sorted(found):
            value = getattr(module, key)
            if inspect.ismodule(value):
                modules.append(f"{name}.{key}")
            elif id(value) in names:
                yield f"{name}.{key} = {names[id(value)]}"
            else:
                names[id(value)] = f"{name}.{key}"
                yield from described(f"{name}.{key}", value, seen)


if __name__ == "__main__":
    print(*lines(), sep="\n")
