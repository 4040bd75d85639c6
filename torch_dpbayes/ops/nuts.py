"""One state of Pyro's No-U-Turn sampler: exact in the limit of a long warm-up. That the warm-up is
long enough is an assumption, which is never checked on the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..noise import GaussianNoise


def no_u_turn(potential: Callable[[Tensor], Tensor], start: Tensor, warmup_steps: int) -> Tensor:
    """The state after ``warmup_steps`` adaptive steps and one more (Hoffman and Gelman 2014, in
    Pyro's implementation), from ``start`` ``[d]`` under a ``potential`` that is finite everywhere.

    **Privacy.** Step sizes, acceptance rates and divergences are exact functions of the records:
    they are discarded. The randomness comes from the operating system, not from torch's global
    generator: its seed may be known, and another thread may set it.
    """
    from pyro.infer import MCMC, NUTS  # only here: Pyro takes a while to load

    from ..density.pyro_runs import public_randomness, using_pyro

    kernel = NUTS(potential_fn=lambda params: potential(params["theta"]))
    chain = MCMC(
        kernel,
        num_samples=1,
        warmup_steps=warmup_steps,
        initial_params={"theta": start},
        disable_progbar=True,
    )
    # public randomness for random functions that do not use the stream
    with using_pyro, public_randomness(), torch.enable_grad(), _OwnStream():
        chain.run()
    theta: Tensor = chain.get_samples()["theta"][0]
    return theta.detach().clone()


class _OwnStream(TorchFunctionMode):
    """Passes a generator that no other code can seed to this thread's random functions."""

    def __init__(self) -> None:
        super().__init__()
        self._noise = GaussianNoise()

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function in _RANDOM and kwargs.get("generator") is None:
            like = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
            device = (
                like.device
                if like is not None
                else torch.device(kwargs.get("device") or torch.get_default_device())
            )
            kwargs["generator"] = self._noise.next_stream(device, ())
        return function(*args, **kwargs)


_RANDOM = (torch.normal, torch.bernoulli, torch.rand, torch.randn)  # all used by Pyro's sampler
