"""Functions of tensors recorded as fixed graphs of operations."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx


def recorded(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    """What ``function`` does to tensors of the shapes of ``inputs``, as a graph."""
    with warnings.catch_warnings():
        # torch's own use of it, in jacfwd
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)
        graph: GraphModule = make_fx(function)(*inputs)
    _free_constants(graph)
    _leave_out_what_changes_nothing(graph)
    graph.recompile()
    return graph


def _free_constants(graph: GraphModule) -> None:
    """Ones of the shape of something, with which a gradient begins, need not wait for it: then the
    value that is differentiated is not computed for its shape alone.
    """
    ones = torch.ops.aten.ones
    for node in graph.graph.nodes:
        like = node.meta.get("val")
        if node.target is torch.ops.aten.ones_like.default and isinstance(like, Tensor):
            with graph.graph.inserting_before(node):
                options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
                free = graph.graph.call_function(ones.default, (list(like.shape),), options)
            free.meta = dict(node.meta)
            node.replace_all_uses_with(free)


_VIEWS = {
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.expand.default",
    "aten.permute.default",
}


def _leave_out_what_changes_nothing(graph: GraphModule) -> None:
    """What ``vmap`` and ``grad`` leave behind without need; every number stays as it is.

    Views of a tensor in its own shape and strides: what is written into them is written into it as
    before. The copy of one tensor by ``cat`` that is the result, if it is not made of an input's
    memory. Values written in place that nothing reads.
    """
    memory = _memory(graph)
    inputs = {node for node in graph.graph.nodes if node.op in ("placeholder", "get_attr")}
    for node in graph.graph.nodes:
        source: Any = node.args[0] if node.args else None
        if node.target is torch.ops.aten.cat.default and len(source) == 1:
            (source,) = source
            is_result = all(user.op == "output" for user in node.users)
            if not is_result or memory[source] & inputs:
                continue
        elif str(node.target) not in _VIEWS:
            continue
        if _layout(node) == _layout(source):
            node.replace_all_uses_with(source)
    graph.graph.eliminate_dead_code()  # after which only what writes is without use
    read: set[Node] = set()
    for node in reversed(graph.graph.nodes):
        if _writes(node) and not node.users and not memory[node] & (read | inputs):
            graph.graph.erase_node(node)
        else:
            read |= set().union(*(memory[source] for source in node.all_input_nodes))


def _memory(graph: GraphModule) -> dict[Node, set[Node]]:
    """The nodes in whose memory the value of each may lie; those of all inputs where an operation
    writes, or is no operation of torch.
    """
    found: dict[Node, set[Node]] = {}
    for node in graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or schema.is_mutable or str(node.target) in _VIEWS:
            sources = node.all_input_nodes
        else:
            shared = zip(schema.arguments, node.args, strict=False)
            sources = [a for rule, a in shared if rule.alias_info and isinstance(a, Node)]
        found[node] = set().union(*(found[source] for source in sources)) or {node}
    return found


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _layout(node: Node) -> tuple[Any, ...]:
    value: Tensor = node.meta["val"]
    return value.shape, value.stride(), value.storage_offset(), value.dtype


def parts_read(graph: GraphModule, sizes: Sequence[int]) -> list[bool]:
    """Which of the parts of the first input, of these sizes, the results depend on, or may."""
    theta = next(node for node in graph.graph.nodes if node.op == "placeholder")
    found: set[Any] = set()
    for node in theta.users:
        if node.target is not torch.ops.aten.split_with_sizes.default or node.args != (
            theta,
            list(sizes),
        ):
            return [True] * len(sizes)
        if any(user.target is not operator.getitem for user in node.users):
            return [True] * len(sizes)
        found |= {user.args[1] for user in node.users}
    return [number in found for number in range(len(sizes))]


def most_bytes(graph: GraphModule, *inputs: Tensor) -> int:
    """The most memory that intermediate results of ``graph`` take at once."""
    return _LiveBytes(graph).measure(*inputs)


class _LiveBytes(Interpreter):
    def measure(self, *inputs: Tensor) -> int:
        # Not Interpreter.run: that makes a progress bar, whose lock Pyro's own progress bars may
        # hold for ever in a process forked from theirs.
        self.args_iter, self.env, most = iter(inputs), {}, 0
        for node in self.graph.nodes:
            self.env[node] = self.run_node(node)
            storages = [t.untyped_storage() for t in self.env.values() if isinstance(t, Tensor)]
            most = max(most, sum({s.data_ptr(): s.nbytes() for s in storages}.values()))
            for done in self.user_to_last_uses.get(node, ()):
                del self.env[done]
        return most
