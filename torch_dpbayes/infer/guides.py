"""Pyro's Gaussian guides, as functions of their parameters and of public random numbers."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoGuide,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from torch import Tensor
from torch.distributions import biject_to

from ..density import Prior, without_value_checks
from ..density.arguments import Call
from ..density.pyro_runs import public_randomness
from ..errors import ArgumentError, ArgumentTypeError, StateError

# exactly these classes: the forward() of a subclass may read data
_GAUSSIAN = (AutoNormal, AutoDiagonalNormal, AutoMultivariateNormal, AutoLowRankMultivariateNormal)
_NAME = "_pyro_name"  # the guide's name in the parameter store; Pyro has no public attribute


class GaussianGuide:
    """θ = m + Le with e ~ N(0, I): ∂θ/∂φ and the entropy do not need the data. The guide is one
    of Pyro's. It must not have run before, because its parameters could then depend on data.
    """

    def __init__(self, guide: AutoGuide) -> None:
        if type(guide) not in _GAUSSIAN:
            names = ", ".join(kind.__name__ for kind in _GAUSSIAN)
            raise ArgumentTypeError(
                f"the guide is a {type(guide).__name__}, which may read data: use {names}.",
                code="pyro-guide",
            )
        _require_unused(guide)
        self._guide = guide

    def set_up(self, call: Call, prior: Prior) -> None:
        """Create the guide's parameters from synthetic records. Refuse a guide whose latents are
        not those of ``prior``.
        """
        guide = self._guide
        _require_unused(guide)
        store = pyro.get_param_store()
        stem = f"{getattr(guide, _NAME)}."
        if taken := sorted(name for name in store.keys() if name.startswith(stem)):
            raise ArgumentError(
                f"Pyro's parameter store holds {taken[0]!r} from another run, and the guide would"
                " use it: call pyro.clear_param_store() before.",
                code="pyro-guide",
            )
        args, kwargs = call
        with public_randomness(), store.scope(), poutine.block(), without_value_checks():
            guide(*args, **kwargs)
        prototype: Any = guide.prototype_trace
        sites = {name: site["fn"] for name, site in prototype.iter_stochastic_nodes()}
        ones = prior.unflatten(torch.ones(prior.dimension, dtype=prior.dtype, device=prior.device))
        if set(sites) != set(ones) or not all(
            torch.equal(biject_to(site.support)(ones[name]), prior.transforms[name].inv(ones[name]))
            for name, site in sites.items()
        ):
            raise ArgumentError(
                f"the guide has the latents {sorted(sites)}, the model the continuous latents"
                f" {sorted(ones)}, or supports differ: build the guide from this model.",
                code="pyro-guide",
            )
        # θ has the sites in sorted order, the guide in the order of its trace
        places = prior.unflatten(torch.arange(prior.dimension))
        self._names = list(places)
        self._from_trace = torch.argsort(torch.cat([places[name].reshape(-1) for name in sites]))
        self.parameters: dict[str, torch.nn.Parameter] = dict(guide.named_parameters())

    def draw(self) -> tuple[Tensor, Tensor]:
        """θ and the entropy of the guide up to a constant, differentiable in :attr:`parameters`."""
        guide = self._guide
        if not isinstance(guide, AutoNormal):
            posterior: Any = guide.get_posterior()
            return posterior.rsample()[self._from_trace], posterior.entropy()
        pieces, entropy = [], torch.zeros(())
        for name in self._names:
            loc, scale = attrgetter(name)(guide.locs), attrgetter(name)(guide.scales)
            pieces.append((loc + scale * torch.randn_like(loc)).reshape(-1))
            entropy = entropy + scale.log().sum()
        return torch.cat(pieces), entropy

    def require_own(self) -> None:
        """Raise if the guide's parameters are not the ones that the run created."""
        if any(p is not self.parameters.get(n) for n, p in self._guide.named_parameters()):
            raise StateError(
                "the guide's parameters were replaced since the last step (by Pyro's parameter"
                " store?): build a new guide and DPSVI after pyro.clear_param_store().",
                code="pyro-guide",
            )

    @torch.no_grad()
    def put(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name])


def _require_unused(guide: Any) -> None:
    if guide.prototype_trace is not None:
        raise ArgumentError(
            "the guide was used before, so its parameters may come from the data: pass a new one,"
            " and start values as init_loc_fn=.",
            code="pyro-guide",
        )
