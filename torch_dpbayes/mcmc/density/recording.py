"""Functions of tensors recorded as fixed graphs of operations."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx


def recorded(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    """What ``function`` does to tensors of the shapes of ``inputs``, as a graph."""
    with warnings.catch_warnings():
        # torch's own use of it, in jacfwd
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)
        graph: GraphModule = make_fx(function)(*inputs)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


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
