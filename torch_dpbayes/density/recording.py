"""Functions of tensors recorded as fixed graphs of operations."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize, vmap
from torch.fx import Graph, GraphModule, Interpreter
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx

from .pyro_runs import UnfitModel

_aten = torch.ops.aten
_MASKS = {torch.bool, torch.uint8}
# under vmap torch's own rule for this operation warns
_PARTS: Any = get_decompositions([_aten.log_sigmoid_backward])
_VIEWS = {"aten.view", "aten._unsafe_view", "aten.expand", "aten.permute"}


def recorded(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    """The operations of ``function`` for the shapes of ``inputs``, as a graph without in-place
    writes. Useless operations of ``vmap`` and ``grad``, a tenth of the time of a gradient, are
    removed: views of a tensor in its own layout, the concatenation of one tensor.

    Raises:
        ValueError: a shape depends on values of the inputs, but would be constant in the graph.
    """
    with torch.inference_mode(False), torch.enable_grad():
        # the first backward pass starts a thread for each device: if it ran under the fake mode, it
        # would start threads that no fork of this process has
        torch.ones(1, requires_grad=True).sum().backward()
    # one fake mode for the shapes of all values: torch would create one for each value
    one_mode = tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True)))
    with one_mode, _use_lazy_graph_module(True):  # compiled when it runs first
        graph: GraphModule = make_fx(functionalize(function), _PARTS)(*inputs)
    varying: set[Any] = set()
    for node in graph.graph.nodes:
        if node.op == "placeholder" or not varying.isdisjoint(node.all_input_nodes):
            varying.add(node)
        if _shape_follows(varying, node):
            raise UnfitModel(f"values decide about the shape of {node.target}")
        source: Any = node.args[0] if node.args else None
        if node.target is _aten.ones_like.default:
            # a gradient begins with ones, which need only a shape, not the value
            like = node.meta["val"]
            options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
            with graph.graph.inserting_before(node):
                ones = graph.graph.call_function(_aten.ones.default, (list(like.shape),), options)
            ones.meta = dict(node.meta)
            node.replace_all_uses_with(ones)
            continue
        if node.target is _aten.cat.default and len(source) == 1:
            (source,) = source
        elif str(node.target).removesuffix(".default") not in _VIEWS:
            continue
        if _layout(node.meta["val"]) == _layout(source.meta["val"]):
            node.replace_all_uses_with(source)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _shape_follows(varying: set[Any], node: Any) -> bool:
    """Whether the shape of the result of ``node`` depends on values of the ``varying`` nodes."""
    if torch.Tag.dynamic_output_shape not in getattr(node.target, "tags", ()):
        return False
    if node.target is not _aten.index.Tensor:
        return node in varying
    return any(k in varying and k.meta["val"].dtype in _MASKS for k in node.args[1])


def _layout(value: Tensor) -> tuple[Any, ...]:
    return value.shape, value.stride(), value.storage_offset(), value.dtype


def of_rows(graph: GraphModule, rows: Tensor) -> Any:
    """The results of ``graph`` for every row, along a first dimension."""
    try:
        return vmap(graph, randomness="different")(rows)
    except RuntimeError:  # vmap lacks an operation of the model, whatever the values are
        results = [graph(row) for row in rows]
        if isinstance(results[0], Tensor):
            return torch.stack(results)
        return tuple(map(torch.stack, zip(*results, strict=True)))


def parts_read(graph: GraphModule, sizes: Sequence[int]) -> dict[Any, set[int]]:
    """For each node, the parts of the first input, of these sizes, on which it may depend."""
    found: dict[Any, set[int]] = {}
    theta = next(node for node in graph.graph.nodes if node.op == "placeholder")
    for node in graph.graph.nodes:
        found[node] = set().union(*(found[source] for source in node.all_input_nodes))
        if node is theta:
            found[node] = set(range(len(sizes)))
        elif node.target is operator.getitem:
            source, number = node.args
            is_split = source.target is _aten.split_with_sizes.default
            if is_split and source.args == (theta, list(sizes)):
                found[node] = {number}
    return found


def result_of(graph: GraphModule, number: int) -> GraphModule:
    """A graph with only the operations for one of the results of ``graph``. An operation that may
    raise an error stays if its inputs do: the value may exist where the derivative does not.
    """
    *_, output = graph.graph.nodes
    wanted = output.args[0][number]
    needed, left = set[Any](), [wanted]
    while left:
        needed.add(node := left.pop())
        left += set(node.all_input_nodes) - needed

    def stays(node: Any) -> bool:
        sources = (s.args[0] if s.target is operator.getitem else s for s in node.all_input_nodes)
        return node.is_impure() and needed.issuperset(sources)

    kept = needed.copy()
    for node in graph.graph.nodes:
        if node is not output and stays(node):
            kept |= {node, *node.all_input_nodes}
    part, own = Graph(), dict[Any, Any]()
    for node in graph.graph.nodes:
        if node in kept:
            own[node] = part.node_copy(node, own.__getitem__)
    part.output(own[wanted])
    return GraphModule(graph, part)


def most_bytes(graph: GraphModule, *inputs: Tensor) -> int:
    """The largest memory of the intermediate results of ``graph`` that exist at the same time."""
    # Not Interpreter.run: it creates a progress bar, whose lock may be held for ever by Pyro's
    # progress bars in a process that was forked from theirs.
    run, most = Interpreter(graph), 0
    run.args_iter, run.env = iter(inputs), {}
    for node in graph.graph.nodes:
        run.env[node] = run.run_node(node)
        storages = [t.untyped_storage() for t in run.env.values() if isinstance(t, Tensor)]
        most = max(most, sum({s.data_ptr(): s.nbytes() for s in storages}.values()))
        for done in run.user_to_last_uses.get(node, ()):
            del run.env[done]
    return most
