"""What decides, beside its tensors, what a model computes: as it was when the model was checked.

A check of made-up records holds for the model that was checked. A hook, an exchanged module or
function, another mode, a switch in a plain attribute can turn it into one that mixes records; so
can what a forward pass leaves on a module for the next one.
"""

from __future__ import annotations

import argparse
import dis
import math
import sys
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache, partial
from operator import length_hint
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from .fixed_tensors import same_values
from .layer_kinds import BATCH_NORM_TO_EVAL

_What = tuple[Any, ...]  # words, what they are about, and what that belongs to

_LONGEST_WAIT = 64  # looks
_DEPTH = 6  # of containers, objects and functions within one another
_LARGEST = 10_000  # items of a container that are looked at one by one
_SHORT = 100  # items of a tuple that are looked at wherever it is met
_OURS = "_dpbayes_"  # what names of attributes begin with that this library puts on modules
_UNREAD = frozenset(  # looked at elsewhere, or of no account by itself
    {"_parameters", "_buffers", "_modules", "training", "_compiled_call_impl"}
    | {"_forward_hooks_with_kwargs", "_forward_hooks_always_called"}
    | {"_forward_pre_hooks_with_kwargs", "_non_persistent_buffers_set"}
    | {"_is_accelerate_prepared"}  # a mark of accelerate's, for itself
)
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_LAZY = frozenset(
    {
        "__slotnames__",
        "__annotations__",
        "__doc__",
        "_abc_impl",
        "__weakref__",
        "__annotations_cache__",
    }
)
_NUMBERS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, slice, range)
_ATOMS = frozenset({bool, int, float, str, type(None)})
_COMPARED = (*_NUMBERS, tuple, list, frozenset)
_SETTINGS = (argparse.Namespace, types.SimpleNamespace)
_STDLIB = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
_LIBRARIES = sys.stdlib_module_names | {"torch", "opacus", "numpy", "torch_dpbayes"}

CHANGED = (
    "{} since the model was checked, so it may mix records now. Undo that, or call make_private "
    "again, which checks again."
)
KEPT = (
    "{} in the forward pass: what a model keeps between batches may carry records over. "
    "Keep it outside the model, and pass it to forward as an argument where forward needs it."
)
SWITCHED = (
    "module {!r} was in {} mode when the model was checked and is in {} mode now, where it may mix "
    "records: after every model.train() write {}"
)


class ModelAsChecked:
    """Modules, hooks, modes and plain attributes of a model as they are now, and whether they stay.

    Every look compares identities. Looks 1, 2, 4, … 64 and every 64th also go into containers,
    plain objects, functions (what they close over, and the globals that they read) and the values
    of tensors that are neither parameters nor buffers. Moving the model and loading a state change
    nothing; neither does ``model.eval()`` between steps. Identities, and at the first time all of
    it, are also looked at before every forward pass in training mode with gradients wanted.

    Args:
        module: the model, with everything attached to it that belongs to the library.
        passing: names of attributes that come and go with every pass.
        watch_passes: look before forward passes, too.
        loss: that runs for each record alone. What it reads of variables around it, and of a
            module, could have been made of all records.
    """

    def __init__(
        self,
        module: nn.Module,
        passing: Collection[str] = (),
        *,
        watch_passes: bool = True,
        loss: Callable[..., Any] | None = None,
    ) -> None:
        self._module: nn.Module | None = module
        self._loss = loss
        self._passing = frozenset(passing)
        self._looks, self._is_first = 0, True
        if watch_passes:
            module.register_forward_pre_hook(self._before_pass, prepend=True)
        self._modes = {name: layer.training for name, layer in module.named_modules()}
        self.before = {
            what: CopiedTensor(leaf) if isinstance(leaf, Tensor) else leaf
            for what, leaf in self.leaves().items()
        }
        self._watch()

    def __getstate__(self) -> dict[str, None]:
        """A copy of a private model is looked at no more: it has to be made private again."""
        return {"_module": None}

    @staticmethod
    def remove_from(module: nn.Module) -> None:
        """Look no more before the passes of ``module``, nor of a model it was copied from."""
        for layer in module.modules():
            for key, hook in list(layer._forward_pre_hooks.items()):
                if isinstance(getattr(hook, "__self__", None), ModelAsChecked):
                    del layer._forward_pre_hooks[key]

    def require_unchanged(self) -> None:
        """Raise if the model is not what was checked.

        Raises:
            RuntimeError: what changed.
        """
        self._looks += 1
        is_due = self._looks % _LONGEST_WAIT == 0 or self._looks & (self._looks - 1) == 0
        if is_due or not self._seems_unchanged():
            self._require_same()

    def changed(self) -> str | None:
        """What is not as it was, as the beginning of a sentence."""
        before, now = self.before, self.leaves()
        for what, leaf in now.items():
            if what not in before:
                return f"{_words(what)} was added"
            if not is_same_leaf(before[what], leaf):
                return f"{_words(what)} changed"
        return next((f"{_words(what)} was removed" for what in before if what not in now), None)

    @torch.compiler.disable
    def _before_pass(self, module: nn.Module, _inputs: Any) -> None:
        if self._module is None or not (module.training and torch.is_grad_enabled()):
            return
        is_first, self._is_first = self._is_first, False
        if self._seems_unchanged() and not is_first:
            return
        for name, layer in module.named_modules():
            was_training = self._modes.get(name, layer.training)
            if was_training == layer.training:
                continue
            if layer.training or not type(layer).__module__.startswith("torch."):
                modes = ("training", "eval") if was_training else ("eval", "training")
                back = "train" if was_training else "eval"
                # the others of a frozen network are put back by the same line
                is_norm = not was_training and "BatchNorm" in type(layer).__name__
                line = BATCH_NORM_TO_EVAL if is_norm else f"model.get_submodule({name!r}).{back}()"
                raise RuntimeError(SWITCHED.format(name, *modes, line))
        self._require_same()

    def _require_same(self) -> None:
        if (what := self.changed()) is not None:
            raise RuntimeError(CHANGED.format(what))
        if not self._seems_unchanged():
            self._watch()

    def _seems_unchanged(self) -> bool:
        """Whether everything is the same object; a mode that changed is not."""
        if any(self._empty) or list(map(type, self._layers)) != self._types:
            return False
        try:
            if self._homes != self._copies and not all(
                map(self._is_copy, self._homes, self._copies)
            ):
                return False
        except Exception:  # values that cannot be compared, because they are not the same
            return False
        return all(t._version == version for t, version in self._tensors)

    def _is_copy(self, home: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
        if len(home) == len(before):
            return home == before
        more = home.keys() - before.keys()
        return before.items() <= home.items() and all(map(self._is_passing, more))

    def _is_passing(self, name: str | int) -> bool:
        return name in self._passing or (isinstance(name, str) and name.startswith(_OURS))

    def _watch(self) -> None:
        assert self._module is not None
        self._layers = list(self._module.modules())
        self._types = list(map(type, self._layers))
        own = {cls for kind in set(self._types) for cls in kind.__mro__ if not _is_library(cls)}
        hooks = [vars(layer)[name] for layer in self._layers for name in _HOOKS]
        homes: list[Mapping[str, Any]] = [
            *map(vars, self._layers),
            *(home for home in [*hooks, *(layer._modules for layer in self._layers)] if home),
            *map(vars, own),
        ]
        self._empty = [home for home in [*hooks, *global_hooks().values()] if not home]
        self._empty += [layer._modules for layer in self._layers if not layer._modules]
        self._homes, self._copies = (
            homes,
            [{k: v for k, v in home.items() if not self._is_passing(k)} for home in homes],
        )
        self._tensors = [
            (t, t._version)
            for layer in self._layers
            for t in vars(layer).values()
            if isinstance(t, Tensor) and not t.is_inference()
        ]

    def leaves(self) -> dict[_What, Any]:
        """Everything that counts, by what it is: plain values, tensors, identities."""
        assert self._module is not None
        found: dict[_What, Any] = {}
        tensors = [
            *self._module.named_parameters(remove_duplicate=False),
            *self._module.named_buffers(remove_duplicate=False),
        ]
        look = _Look(found, {id(t): name for name, t in reversed(tensors)})
        for name, layer in self._module.named_modules(remove_duplicate=False):
            whose = ("module {!r}", name or type(layer).__name__)
            found[whose] = layer
            found["the class of", whose] = type(layer)
            look.seen[id(layer)] = layer
        for name, layer in self._module.named_modules():
            whose = ("module {!r}", name or type(layer).__name__)
            look.module(layer, whose, self._is_passing)
            for cls in type(layer).__mro__:
                if id(cls) not in look.seen:
                    look.cls(cls, _DEPTH)
        if self._loss is not None:
            of_loss = _Look(found, look.names, beside=self._module)
            of_loss.seen.update(look.seen)
            of_loss.value(self._loss, ("the loss",), _DEPTH)
        for kind, hooks in global_hooks().items():
            look.value(list(hooks.values()), ("torch's {}", f"global{kind}"), _DEPTH)
        return found


class CopiedTensor:
    """A tensor as it was."""

    def __init__(self, t: Tensor) -> None:
        self.copy = t.detach().clone()


class _Look:
    """Goes through values and notes what they come down to.

    Args:
        found: where that is noted.
        names: of tensors that may be moved.
        beside: the model, where it goes through a loss. Other objects than functions, containers
            and modules, and what has the model in it, are not looked into then: the program around
            the loss counts its steps there.
    """

    def __init__(
        self, found: dict[_What, Any], names: Mapping[int, str], *, beside: nn.Module | None = None
    ) -> None:
        self.found, self.names, self.beside = found, names, beside
        self.seen: dict[int, Any] = {}  # which keeps them, so that no number is taken twice
        self.first: dict[int, str] = {}  # where a container was met first, in words

    def module(self, layer: nn.Module, whose: _What, is_passing: Callable[[str], bool]) -> None:
        for name, value in list(vars(layer).items()):
            if name in _HOOKS:
                for hook in value.values():
                    kind = name.strip("_").replace("_", " ").removesuffix("s")
                    self.value(hook, (f"a {kind} of", whose), _DEPTH)
            elif type(value) in _ATOMS and name not in _UNREAD:
                self.found["attribute {!r} of", name, whose] = value
            elif name not in _UNREAD and not is_passing(name):
                self.value(value, ("attribute {!r} of", name, whose), _DEPTH)

    def cls(self, cls: type, depth: int) -> None:
        self.seen[id(cls)] = cls
        whose = ("class {!r}", cls.__name__)
        named = [(name, value) for name, value in vars(cls).items() if name not in _LAZY]
        if _is_library(cls):
            self._note(whose, named)
            return
        for name, value in named:
            self.value(value, ("{!r} of", name, whose), depth)

    def value(self, value: Any, what: _What, depth: int) -> None:
        if isinstance(value, Tensor):
            self._note(what, self.names.get(id(value), value))
        elif isinstance(value, _NUMBERS):
            self._note(what, value)
        elif isinstance(value, numpy.ndarray):
            is_plain = not value.dtype.hasobject
            self._note(what, (value.shape, str(value.dtype), value.tobytes() if is_plain else None))
            if not is_plain:
                self.value(value.tolist(), ("the items of", what), depth)
            for name, item in _attributes(value):  # of a subclass, like a mask
                self.value(item, ("attribute {!r} of", name, what), depth - 1)
        elif isinstance(value, types.MethodType):
            self.value(value.__func__, what, depth)
            if self.beside is None:
                self.value(value.__self__, what, depth)
        elif isinstance(value, (staticmethod, classmethod)):
            self.value(value.__func__, what, depth)
        elif isinstance(value, property):
            self.value((value.fget, value.fset, value.fdel), what, depth)
        elif isinstance(value, weakref.ref):
            self.value(value(), what, depth)
        elif isinstance(value, (list, tuple, deque, set, frozenset, dict)):
            self._container(value, what, depth)
        else:
            self._object(value, what, depth)

    def _container(self, value: Any, what: _What, depth: int) -> None:
        self._note(what, (type(value), len(value)))
        if depth <= 0 or len(value) > _LARGEST:
            return
        if id(value) in self.seen and not (type(value) is tuple and len(value) <= _SHORT):
            # else it could be exchanged for another one that was seen, of equal length
            self._note(("the place of", what), self.first.get(id(value)))
            return
        self.seen[id(value)] = value
        self.first.setdefault(id(value), _words(what))
        for name, item in _attributes(value):  # of a subclass
            self.value(item, ("attribute {!r} of", name, what), depth - 1)
        if isinstance(value, (set, frozenset)):
            self._note(("the members of", what), frozenset(map(id, value)))
        elif isinstance(value, dict):
            self._note(("the order of", what), tuple(map(_brief, dict.keys(value))))
            for key, item in list(dict.items(value)):
                self.value(item, ("item {!r} of", key, what), depth - 1)
        else:
            for k, item in enumerate(list(value)):
                self.value(item, ("item {!r} of", k, what), depth - 1)

    def _object(self, value: Any, what: _What, depth: int) -> None:
        is_partial = isinstance(value, partial)
        self._note(what, type(value) if is_partial else value)
        if hasattr(type(value), "__next__"):
            left = repr(value) if type(value).__module__ == "itertools" else length_hint(value, -1)
            self._note(("the place of", what), left)
        if depth == 0 or id(value) in self.seen:
            return
        self.seen[id(value)] = value
        if is_partial:
            self.value((value.func, value.args, value.keywords), ("the parts of", what), depth)
        elif isinstance(value, types.FunctionType):
            # a wrapper goes by the name of what it wraps
            if not (_is_library(value) and _is_library_file(value.__globals__.get("__name__"))):
                self._function(value, what, depth - 1)
        elif isinstance(value, type):
            if self.beside is None and not _is_library(value):
                self.cls(value, depth - 1)
        elif isinstance(value, nn.Module):  # one that the model does not know of
            if self.beside is not None and any(m is self.beside for m in value.modules()):
                return
            self.module(value, what, lambda _: False)
            self.value((value.training, value._modules), what, depth - 1)
            self.value((value._parameters, value._buffers), ("the tensors of", what), depth - 1)
        elif isinstance(value, _SETTINGS) or (
            self.beside is None and not _is_from_libraries(type(value))
        ):
            for name, item in _attributes(value):
                self.value(item, ("attribute {!r} of", name, what), depth - 1)

    def _function(self, function: types.FunctionType, what: _What, depth: int) -> None:
        code = function.__code__
        self._note(("the code of", what), code)
        self.value(function.__defaults__, ("the defaults of", what), depth)
        self.value(function.__kwdefaults__, ("the defaults by name of", what), depth)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                held = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            self.value(held, ("variable {!r} of", name, what), depth)
        for name, held in list(vars(function).items()):
            self.value(held, ("attribute {!r} of", name, what), depth)
        for name in _globals_of(code):
            if name in function.__globals__:
                held = function.__globals__[name]
                if isinstance(held, types.ModuleType):
                    self._variables(held, _attributes_of(code), depth)
                    continue
                where = ("global variable {!r} of", name, ("{}", function.__module__))
                if where not in self.found:
                    self.value(held, where, depth)

    def _variables(self, home: types.ModuleType, names: Collection[str], depth: int) -> None:
        """Those of a file of the caller's, and of files in it if that is a package."""
        if _is_library_file(home.__name__):
            return
        for name in names:
            where = ("global variable {!r} of", name, ("{}", home.__name__))
            if name in vars(home) and where not in self.found:
                held = vars(home)[name]
                self.value(held, where, depth)
                if isinstance(held, types.ModuleType):
                    self._variables(held, names, depth)

    def _note(self, what: _What, leaf: Any) -> None:
        while what in self.found:  # the next of the same name
            what = ("", what)
        self.found[what] = leaf


def _words(what: Any) -> str:
    """``("item {!r} of", 3, ("{}", "x"))`` is "item 3 of x"."""
    if not isinstance(what, tuple):
        return str(what)
    is_within = isinstance(what[-1], tuple)
    words = what[0].format(*what[1:-1] if is_within else what[1:])
    return f"{words} {_words(what[-1])}".strip() if is_within else words


def leaves_of(module: nn.Module) -> dict[Any, Any]:
    """What decides what a model computes beside the tensors that it knows by name, so that it can
    be compared with that of another object: copies of other tensors, and in the place of a module
    its class and its name in the model.
    """
    names = {layer: name for name, layer in module.named_modules()}
    found: dict[Any, Any] = {
        what: (type(leaf), names.get(leaf)) if isinstance(leaf, nn.Module) else leaf
        for what, leaf in ModelAsChecked(module, watch_passes=False).before.items()
    }
    found["modes"] = [(name, layer.training) for layer, name in names.items()]
    return found


def is_same_leaf(before: Any, now: Any) -> bool:
    """Whether two leaves are the same object or of equal value."""
    if isinstance(before, CopiedTensor):
        if isinstance(now, CopiedTensor):
            now = now.copy
        return isinstance(now, Tensor) and same_values(before.copy, now)
    if before is now:
        return True
    if type(before) is not type(now) or not isinstance(now, _COMPARED):
        return False
    return before == now or (isinstance(now, float) and math.isnan(now) and math.isnan(before))


def _is_from_libraries(value: Any) -> bool:
    return _is_one_of_libraries(getattr(value, "__module__", None) or "builtins")


def _is_library(value: Any) -> bool:
    """Whether a class or function comes with Python or a package, whose code nobody changes."""
    return _is_library_file(getattr(value, "__module__", None) or "builtins")


def _is_library_file(module: Any) -> bool:
    return isinstance(module, str) and (_is_one_of_libraries(module) or _is_installed(module))


@lru_cache(4096)
def _is_one_of_libraries(module: str) -> bool:
    home = module.partition(".")[0]
    if home not in _LIBRARIES:
        return False
    # a file of the caller's may be called test.py or code.py
    file = getattr(sys.modules.get(home), "__file__", None)
    return home not in sys.stdlib_module_names or file is None or file.startswith(_STDLIB)


@lru_cache(4096)
def _is_installed(module: str) -> bool:
    return "site-packages" in (getattr(sys.modules.get(module), "__file__", None) or "")


@lru_cache(4096)
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """Names of the global variables that a function, or one inside it, reads."""

    def names(code: types.CodeType) -> Iterator[str]:
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                yield instruction.argval
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from names(constant)

    return tuple(dict.fromkeys(names(code)))


@lru_cache(4096)
def _attributes_of(code: types.CodeType) -> tuple[str, ...]:
    """Names of attributes, among others, that a function, or one inside it, reads."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return tuple(dict.fromkeys([*code.co_names, *(n for c in inner for n in _attributes_of(c))]))


def _brief(key: Any) -> Any:
    """What tells keys of a dict apart."""
    return key if type(key) in _ATOMS else (type(key), hash(key))


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(value, "__dict__", {}).items())
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name != "__dict__" and hasattr(value, name):
                yield name, getattr(value, name)


def global_hooks() -> dict[str, dict[int, Any]]:
    """Hooks on all modules of the process."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return {name: getattr(torch_module, f"_global{name}") for name in names}
