"""Samples for the tests of this folder: of chosen outputs, or of a random walk of a network."""

import copy

import torch
from torch import nn

from torch_dpbayes import PosteriorSamples


class Table(nn.Module):
    """Its output is a parameter, of which an input chooses the row."""

    def __init__(self, output):
        super().__init__()
        self.output = nn.Parameter(torch.as_tensor(output, dtype=torch.float64))

    def forward(self, x):
        return self.output[x]


def sampled(outputs, *arguments, **options):
    """Samples whose outputs are ``outputs[s]``, the model, and inputs for all rows."""
    samples = PosteriorSamples(*arguments, burn_in=0, **options)
    for output in outputs:
        model = Table(output)
        samples.collect(model)
    return samples, model, torch.arange(len(outputs[0]))


def walked(model, count=12, **options):
    """Samples of a random walk of the trainable parameters, and the state dict of every step."""
    samples, states = PosteriorSamples(**{"burn_in": 0, **options}), []
    for _ in range(count):
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p.add_(0.3 * torch.randn_like(p))
        samples.collect(model)
        states.append(copy.deepcopy(model.state_dict()))
    return samples, states
