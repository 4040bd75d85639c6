"""Functions of tensors recorded as fixed graphs of operations."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx


def recorded(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    """What ``function`` does to tensors of the shapes of ``inputs``, as a graph."""
    with warnings.catch_warnings():
        # torch's own use of it, in jacfwd
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)
        graph: GraphModule = make_fx(function)(*inputs)
    _free_constants(graph)
    graph.graph.eliminate_dead_code()
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
