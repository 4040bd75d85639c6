"""Recorded graphs are shorter than what was run, and give the same numbers."""

import pytest
import torch
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from torch_dpbayes.density.recording import recorded


def operations(graph):
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def writes_into_a_view(x, y):
    copy = x.clone()
    seen = copy.view(copy.shape)
    seen.mul_(2)
    return copy + y


def reads_before_it_writes(x, y):
    copy = x.exp()
    before = copy.clone()
    copy.log_()
    return before * y


def reads_what_it_wrote_through_another_name(x, y):
    copy = x.exp()
    half = copy[:2]
    copy.add_(y)
    return half.sum() * y


def one_part(x, y):
    return torch.cat([x * y], 1)


def one_part_that_is_an_input(x, y):
    return torch.cat([x], 1)


def writes_into_one_part(x, y):
    whole = x * y
    copy = torch.cat([whole], 1)
    copy.add_(1)
    return copy + whole


def writes_into_several(x, y):
    first, second = x.exp(), y.exp()
    torch._foreach_add_([first, second], 1.0)
    return first * second


def parts_written_apart(x, y):
    first, rest = x.clone().split([1, x.shape[0] - 1])
    first.add_(1)
    return first.sum() + rest.sum() * y


def logistic_gradient(x, y):
    def term(theta, row, label):
        logits = (row.view(1, -1) @ theta.view(-1)).expand(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, label.view(1))
        return -loss

    labels = (y[:, 0] > 0).to(x.dtype)
    return vmap(grad(term), in_dims=(None, 0, 0))(x[0], y, labels)


FUNCTIONS = (
    writes_into_a_view,
    reads_before_it_writes,
    reads_what_it_wrote_through_another_name,
    one_part,
    one_part_that_is_an_input,
    writes_into_one_part,
    writes_into_several,
    parts_written_apart,
    logistic_gradient,
)


@pytest.mark.first_cases(len(FUNCTIONS))
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_a_recorded_graph_gives_the_same_bits(function):
    example = torch.randn(4, 3), torch.randn(4, 3)
    graph, whole = recorded(function, *example), make_fx(function)(*example)
    assert len(operations(graph)) <= len(operations(whole))
    for _ in range(3):
        x, y = torch.randn(4, 3), torch.randn(4, 3)
        kept = x.clone(), y.clone()
        found, expected = graph(x, y), function(x, y)
        assert found.equal(expected) and torch.equal(x, kept[0]) and torch.equal(y, kept[1])
        found.add_(1)  # its memory is not that of an input
        assert torch.equal(x, kept[0]) and torch.equal(y, kept[1])


def test_what_has_no_use_is_left_out():
    example = torch.randn(4, 3), torch.randn(4, 3)
    found = operations(recorded(logistic_gradient, *example))
    whole = operations(make_fx(logistic_gradient)(*example))
    assert len(found) <= len(whole) - 6 and "aten.log_.default" in whole
    assert "aten.log_.default" not in found and "aten._unsafe_view.default" in whole
    assert operations(recorded(reads_before_it_writes, *example))[-1] == "aten.mul.Tensor"
    assert "aten.log_.default" not in operations(recorded(reads_before_it_writes, *example))
    assert operations(recorded(one_part, *example)) == ["aten.mul.Tensor"]
