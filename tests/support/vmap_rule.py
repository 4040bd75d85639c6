"""A function with a rule of its own for whole batches, which mixes their records."""

import torch


class Centred(torch.autograd.Function):
    """Identity, whose rule subtracts the mean from large numbers, of which no check knows."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g

    @staticmethod
    def vmap(info, in_dims, x):
        return torch.where(x > 1e30, x - x.mean(in_dims[0], keepdim=True), x), in_dims[0]
