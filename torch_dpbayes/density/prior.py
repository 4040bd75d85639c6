"""The latents of a Pyro model as one unconstrained vector θ, and their prior density."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from pyro.distributions import (
    Delta,
    MaskedDistribution,
    SineBivariateVonMises,
    SineSkewed,
    VonMises,
)
from torch import Tensor
from torch.distributions import TransformedDistribution, biject_to
from torch.func import grad_and_value
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from .pyro_runs import (
    Model,
    Trace,
    UnfitModel,
    compute_log_prob,
    continuous_latents,
    first_line,
    improper,
    public_randomness,
    trace_at,
    without_value_checks,
)
from .recording import of_rows, parts_read, recorded, result_of

# torch states the whole real line as their support
_ANGLES = (VonMises, SineBivariateVonMises, SineSkewed)
_MASK = "_mask"  # attribute of Pyro's masked distributions, which has no public name
_DRAWS = 100


class Prior:
    """The latents of a Pyro model as one unconstrained vector θ, and their log density with the
    Jacobian terms.

    Args:
        model: θ has its continuous latents; its observed sites are ignored, except ``factors``.
        args, kwargs: the model's arguments, without data: synthetic ones if the model has data.
        factors: names of observed sites that are functions of the latents alone: their factors
            belong to the prior.

    Attributes:
        factors: the argument.
        transforms: for each site, from the support of its distribution to unconstrained space.
        dtype, device: of θ.

    Raises:
        ValueError: there are no latents, or a latent has no proper prior.

    **Privacy.** A function of θ and public arguments: nothing is charged.
    """

    def __init__(
        self,
        model: Model,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        factors: Sequence[str] = (),
    ) -> None:
        self.factors = tuple(factors)
        self._model, self._args, self._kwargs = model, tuple(args), dict(kwargs or {})
        self.transforms: dict[str, Any] = {}
        self._shapes: dict[str, torch.Size] = {}
        with public_randomness(), without_value_checks():
            first, second = self.trace(), self.trace()
        latents = continuous_latents(first)
        if not latents:
            raise UnfitModel(
                "the model has no continuous latent site to sample: write pyro.sample(name,"
                " distribution) without obs=."
            )
        if set(latents) != set(continuous_latents(second)):
            raise UnfitModel(
                "two runs of the model have different latent sites: sample the same ones in every"
                " run."
            )
        samples = []
        for name in sorted(latents):
            site = first.nodes[name]
            _require_proper(name, site)
            try:
                to_support = biject_to(site["fn"].support)
            except NotImplementedError:
                raise UnfitModel(
                    f"torch has no map from real numbers to the values of latent {name!r}: for a"
                    " covariance matrix sample LKJCholesky and the standard deviations."
                ) from None
            self.transforms[name] = to_support.inv
            value = to_support.inv(site["value"].detach())
            self._shapes[name] = value.shape
            samples.append(value)
        dtypes = {sample.dtype for sample in samples}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else torch.float64
        self.device = samples[0].device
        self._sizes = [shape.numel() for shape in self._shapes.values()]
        # the θ for recording: at 0 a covariance matrix of latents may be singular
        self._drawn = torch.cat([v.reshape(-1).to(self.device, self.dtype) for v in samples])

    # -- coordinates -------------------------------------------------------------------------------

    @property
    def dimension(self) -> int:
        return sum(self._sizes)

    def flatten(self, params: Mapping[str, Tensor]) -> Tensor:
        """θ from unconstrained values by site; the sites and shapes are checked."""
        if set(params) != set(self._shapes):
            raise UnfitModel(
                f"values for the latents {sorted(self._shapes)} are needed, got {sorted(params)}."
            )
        for name, shape in self._shapes.items():
            if params[name].shape != shape:
                raise UnfitModel(
                    f"latent {name!r} needs the unconstrained shape {tuple(shape)}, got"
                    f" {tuple(params[name].shape)}."
                )
        values = (params[name].detach().reshape(-1) for name in self._shapes)
        return torch.cat([value.to(self.device, self.dtype) for value in values])

    def unflatten(self, theta: Tensor) -> dict[str, Tensor]:
        parts = zip(self._shapes.items(), theta.split(self._sizes), strict=True)
        return {name: part.reshape(shape) for (name, shape), part in parts}

    def constrain(self, theta: Tensor) -> dict[str, Tensor]:
        """Values by site, in the supports of the model's distributions."""
        values = self.unflatten(theta)
        return {name: self.transforms[name].inv(value) for name, value in values.items()}

    def read_by(self, function: Callable[[dict[str, Tensor]], Any]) -> Tensor:
        """Like :meth:`read_in`, for a function of the sites' values. All True if it cannot be
        recorded.
        """
        try:
            with without_value_checks(), torch.no_grad():
                graph = recorded(lambda theta: function(self.constrain(theta)), self._drawn)
        except Exception:  # for example, it uses Python numbers
            return torch.ones(self.dimension, dtype=torch.bool)
        return self.read_in(graph)

    def read_in(self, graph: GraphModule) -> Tensor:
        """For each coordinate of θ, the first input, whether the result of ``graph`` depends on it,
        ``[dimension]``. All coordinates of a site have the same value.
        """
        *_, output = graph.graph.nodes
        read = parts_read(graph, self._sizes)[output]
        parts = torch.tensor([number in read for number in range(len(self._sizes))])
        return parts.repeat_interleave(torch.tensor(self._sizes))

    def are_sites_independent(self) -> bool:
        """Whether no site's distribution reads another site, wherever θ is."""
        _, found = self._density_program
        return not any(read - {own} for own, read in enumerate(found))

    # -- density -----------------------------------------------------------------------------------

    def log_density(self, theta: Tensor) -> float:
        """log p(θ) with the Jacobian terms."""
        with torch.no_grad():
            return float(self._density_program[0](theta))

    def log_densities(self, thetas: Tensor) -> Tensor:
        """log p(θ) with the Jacobian terms of every row of ``thetas``, (rows,)."""
        with torch.no_grad(), public_randomness():
            return of_rows(self._density_program[0], thetas)

    def log_density_and_gradient(self, theta: Tensor) -> tuple[float, Tensor]:
        """log p(θ) with the Jacobian terms, and its gradient."""
        with torch.no_grad():
            gradient, value = self._gradient_program[0](theta)
        return float(value), gradient

    def log_densities_and_gradients(self, thetas: Tensor) -> tuple[Tensor, Tensor]:
        """The same for every row of ``thetas``, (rows,) and (rows, d)."""
        with torch.no_grad(), public_randomness():
            gradients, values = of_rows(self._gradient_program[0], thetas)
        return values, gradients

    @cached_property
    def _density_program(self) -> tuple[GraphModule, list[set[int]]]:
        """log p(θ), and for each site the numbers of the sites that its distribution reads."""
        if "_gradient_program" in self.__dict__:
            graph, read = self._gradient_program
            return result_of(graph, 1), read
        return self._program(self._density_and_ends)

    @cached_property
    def _gradient_program(self) -> tuple[GraphModule, list[set[int]]]:
        return self._program(grad_and_value(self._density_and_ends, has_aux=True))

    def _program(self, function: Callable[..., Any]) -> tuple[GraphModule, list[set[int]]]:
        """The program of what ``function`` returns before the sites' terms and ends.

        Raises:
            UnfitModel: a support depends on θ.
        """
        graph = self._recorded(lambda theta: tree_leaves(function(theta)), self._drawn)
        *_, output = graph.graph.nodes
        count, found = len(self._shapes), output.args[0]
        read = parts_read(graph, self._sizes)
        for name, end in zip(self._shapes, found[-count:], strict=True):
            if read[end]:
                raise UnfitModel(
                    f"the support of latent {name!r} changes between runs of the model: sample it"
                    " in a fixed support and scale the value."
                )
        terms, wanted = found[-2 * count : -count], found[: -2 * count]
        result = [read[term] for term in terms]
        output.args = (wanted if len(wanted) > 1 else wanted[0],)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        return graph, result

    def _density_and_ends(self, theta: Tensor) -> tuple[Tensor, list[Tensor]]:
        """log p(θ); the terms of the sites in it, and an end of the support of each."""
        result, trace = self._density_and_trace(theta, self._args, self._kwargs)
        sites = [trace.nodes[name] for name in self._shapes]
        ends = [
            biject_to(site["fn"].support)(torch.ones(shape, dtype=self.dtype, device=self.device))
            for site, shape in zip(sites, self._shapes.values(), strict=True)
        ]
        return result, [*(site["log_prob_sum"] for site in sites), *ends]

    def log_density_with(
        self, theta: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor:
        """log p(θ), computed by the model with other arguments."""
        return self._density_and_trace(theta, args, kwargs)[0]

    def _density_and_trace(
        self, theta: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Trace]:
        unconstrained, values = self.unflatten(theta), self.constrain(theta)
        trace = trace_at(self._model, values, args, kwargs)
        compute_log_prob(trace, {*self._shapes, *self.factors})
        result = theta.new_zeros(())
        for name in self.factors:
            result = result + trace.nodes[name]["log_prob_sum"]
        for name in self._shapes:
            jacobian = self.transforms[name].log_abs_det_jacobian(values[name], unconstrained[name])
            result = result + trace.nodes[name]["log_prob_sum"] - jacobian.sum()
        return result, trace

    def require_no_tensors_in(self, names: Sequence[str], theta: Tensor) -> None:
        """Raise if one of the factors ``names`` reads a tensor of several numbers that is not an
        argument of the model: it may have records, which would be neither clipped nor charged.
        """
        arguments = [*self._args, *self._kwargs.values()]
        for name in names:
            with public_randomness():
                graph = self._recorded(lambda at, name=name: _term(self.trace(at), name), theta)
            read = [getattr(graph, str(n.target)) for n in graph.graph.nodes if n.op == "get_attr"]
            if any(t.numel() > 1 and all(t is not given for given in arguments) for t in read):
                raise UnfitModel(
                    f"site {name!r} outside the data plate reads a tensor that is not an argument:"
                    " records in it would be neither clipped nor charged. Move it into the plate,"
                    " or write public constants as numbers."
                )

    def sample(self) -> Tensor:
        """A draw of θ from the prior."""
        return self.samples(1)[0]

    def samples(self, count: int) -> Tensor:
        """This many draws of θ from the prior, ``(count, d)``, with finite density."""
        found: list[Tensor] = []
        nodes = self._density_program[0].graph.nodes
        # an operation that is more than a function of its inputs, such as a draw of a mixture's
        # class, runs for each draw alone
        is_single = count == 1 or any(n.is_impure() for n in nodes if n.op == "call_function")
        for _ in range(_DRAWS):
            with public_randomness(), without_value_checks():
                sites = [self.trace().nodes for _ in range(count)]
            transforms = self.transforms.items()
            drawn = [{name: t(site[name]["value"]) for name, t in transforms} for site in sites]
            finite = [theta for theta in map(self.flatten, drawn) if theta.isfinite().all()]
            if is_single:
                found += [theta for theta in finite if math.isfinite(self.log_density(theta))]
            elif finite:
                thetas = torch.stack(finite)
                found += thetas[self.log_densities(thetas).isfinite()]
            if len(found) >= count:
                return torch.stack(found[:count])
        raise UnfitModel(
            f"{_DRAWS} draws from the prior had no finite density: pass initial_params= to MCMC,"
            " chosen without the data.",
            code="pyro-start",
        )

    def run(self) -> Any:
        """Run the model under the caller's Pyro handlers."""
        return self._model(*self._args, **self._kwargs)

    def _recorded(self, function: Callable[..., Any], theta: Tensor) -> GraphModule:
        try:
            with without_value_checks():
                # make_fx miscounts the arguments of a bound method
                return recorded(lambda theta: function(theta), theta)
        except Exception as error:
            raise UnfitModel(
                f"the prior cannot be recorded as tensor operations: {first_line(error)}. Write the"
                " model without Python branches on values, .item(), .numpy(), one_hot (instead:"
                " z[..., None] == torch.arange(K)) and custom autograd functions."
            ) from error

    def trace(self, theta: Tensor | None = None) -> Trace:
        """One run of the model: at θ, or at a draw from the prior."""
        values = {} if theta is None else self.constrain(theta)
        try:
            return trace_at(self._model, values, self._args, self._kwargs)
        except NotImplementedError as error:
            raise improper(error) from error


def _term(trace: Trace, name: str) -> Tensor:
    compute_log_prob(trace, {name})
    value: Tensor = trace.nodes[name]["log_prob_sum"]
    return value


def _require_proper(name: str, site: Any) -> None:
    """Refuse a latent whose prior has infinite mass, although it can be sampled."""
    masks, distribution = [site["mask"]], site["fn"]
    while distribution is not None:
        if isinstance(distribution, _ANGLES):
            raise UnfitModel(
                f"latent {name!r} is an angle with a periodic prior: sample it from"
                " Uniform(-math.pi, math.pi), and add its log_prob as a pyro.factor outside the"
                " data plate."
            )
        if isinstance(distribution, Delta):
            raise UnfitModel(
                f"latent {name!r} is a Delta, so a chain cannot move it: write its value."
            )
        if type(distribution).support is TransformedDistribution.support:
            supports = [distribution.base_dist.support]
            supports += [transform.codomain for transform in distribution.transforms]
            pairs = zip(supports, distribution.transforms, strict=False)
            if any(_from_reals(support) != _from_reals(t.domain) for support, t in pairs):
                raise UnfitModel(
                    f"torch does not know the support of latent {name!r}, a transformed"
                    " distribution: sample the base distribution, and transform its value."
                )
        if isinstance(distribution, MaskedDistribution):
            masks.append(getattr(distribution, _MASK))
        distribution = getattr(distribution, "base_dist", None)
    flat = [mask for mask in masks if mask is not None and not bool(torch.as_tensor(mask).all())]
    if flat or bool((torch.as_tensor(site["scale"]) == 0).any()):
        raise UnfitModel(
            f"a mask or a scale of 0 removes the prior of latent {name!r}: write a wide Normal in"
            " its place, or remove the latent."
        )


def _from_reals(support: Any) -> Any:
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return biject_to(support)
