"""Optimizers whose gradients a test gives, and the usual loop over a private loader."""

import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn

from torch_dpbayes.optim import DPSGLD

GIVEN = {"num_data": 100, "expected_batch_size": 10, "max_grad_norm": 1.0, "sampling": "poisson"}


def bare(params, kind=DPSGLD, lr=0.1, **options):
    """An optimizer without an engine, on Poisson batches unless they are said to be full."""
    given = {**GIVEN, **options}
    if given["expected_batch_size"] == given["num_data"]:
        given["sampling"] = options.get("sampling")
    return kind(params, lr, assume_independent_records=True, **given)


def zeros(*shape, dtype=torch.float64):
    return nn.Parameter(torch.zeros(*shape, dtype=dtype))


def fill(parameters, records=10, value=None):
    """Every parameter gets gradients of so many records, random ones or all of one value."""
    for p in parameters:
        shape = (records, *p.shape)
        random = torch.randn(shape, dtype=p.dtype)
        p.grad_sample = random if value is None else torch.full(shape, value, dtype=p.dtype)


def one(net, optimizer, batch, loss=nn.functional.cross_entropy):
    """One step of the usual loop."""
    x, y = batch
    optimizer.zero_grad()
    loss(net(x), y).backward()
    optimizer.step()


def in_parts(loader, optimizer, size):
    """Draws in parts of at most so many records."""
    return BatchMemoryManager(data_loader=loader, max_physical_batch_size=size, optimizer=optimizer)


def train(net, optimizer, loader, steps=None, epochs=1, loss=nn.functional.cross_entropy):
    """So many steps over as many passes as they take, or all of some passes."""
    done = 0
    while steps is not None or epochs > 0:
        for batch in loader:
            if done == steps:
                return
            one(net, optimizer, batch, loss)
            done += 1
        if steps is None:
            epochs -= 1
