"""DPSVI: variational inference with Pyro's Gaussian guides on clipped, noisy gradients."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NoReturn

import pyro
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceEnum_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoGuide,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.optim import PyroOptim
from torch import Tensor, nn
from torch.distributions import biject_to
from torch.utils._pytree import tree_flatten

from ..accounting.accountant import PrivacyAccountant, PrivacyBudgetExceeded
from ..accounting.events import (
    DpEvent,
    PoissonSampledDpEvent,
    noise_event,
    noise_multiplier_or_0,
    positive_count,
)
from ..batches.sampler import PoissonSampler
from ..density import Model, Prior, RecordDensity, without_value_checks
from ..density.arguments import Call
from ..density.pyro_runs import frozen_ones_kept, public_randomness
from ..distributed import require_single_process
from ..errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    DivergedError,
    StateError,
    reading_state,
)
from ..noise import GaussianNoise, can_hide, check_clip_bound, check_positive
from ..noise_aware.run import budget_of, public_num_data
from ..processes import Lock

_log = logging.getLogger("torch_dpbayes")
_WAITING = "_state_waiting_to_be_consumed"  # of Pyro's optimizers, which have no public attribute
# exactly these classes: the forward() of a subclass may read data
_GAUSSIAN = (AutoNormal, AutoDiagonalNormal, AutoMultivariateNormal, AutoLowRankMultivariateNormal)
_NAME = "_pyro_name"  # the guide's name in the parameter store; Pyro has no public attribute
_ELBO = (Trace_ELBO, TraceMeanField_ELBO, TraceGraph_ELBO, TraceEnum_ELBO)
_LATER: Any = None  # the value before the first step
_DRAWS = 100  # largest number of draws until the model can be evaluated at one
_INDEPENDENCE = "by torch.func.vmap over a graph recorded on synthetic records"
_RECENT = 3  # iterate t counts about t³ times in the average


class DPSVI:
    r"""Differentially private variational inference; it replaces ``pyro.infer.SVI``.

    A step draws θ = T_φ(e), e ~ N(0, I), from the guide, and a Poisson batch of the data plate's
    records. It releases one vector with the size of θ, and changes the guide's parameters φ:

    .. math::
        \tilde g = \frac1q\Big(-\sum_{i\in\mathrm{batch}}\mathrm{clip}_C\big(\nabla_\theta \log
        p(x_i|\theta)\big) + zC\xi\Big), \qquad \hat\nabla_\phi = \Big(\frac{\partial\theta}{
        \partial\phi}\Big)^{\!\top}\big(\tilde g - \nabla\log p(\theta)\big)
        - \nabla_\phi H[q_\phi]

    The noise has only the d dimensions of θ, whereas φ has at least 2d ("aligned" gradients). θ is
    in unconstrained space. The entropy H and the prior are exact. The guide's parameters are an
    average of the iterates; iterate t has a weight of about t³. The guide is narrower than the
    posterior given the releases, because it ignores the privacy noise. For intervals that
    include the noise use :func:`~torch_dpbayes.noise_aware.posterior`.

    Sources: Jälkö, Dikmen and Honkela (2017); Prediger, Jälkö, Honkela and Kaski (2022) and Jälkö,
    Prediger, Honkela and Kaski (2023) for aligned gradients.

    Args:
        model: a Pyro model with one data plate that gets its data as arguments, without a trainable
            ``pyro.param`` (see also :class:`~torch_dpbayes.density.RecordDensity`).
        guide: an ``AutoNormal``, ``AutoDiagonalNormal``, ``AutoMultivariateNormal`` or
            ``AutoLowRankMultivariateNormal`` that did not run yet. Its start values come from
            synthetic records; your ``init_loc_fn`` must not use the data.
        optim: one of Pyro's optimizers, with a dict of arguments. It is tested on synthetic
            gradients before the first charge.
        loss: one of Pyro's ELBOs, with one particle. Here all ELBOs have the same gradient.
        max_grad_norm: C, the clip norm of one record's gradient in unconstrained space. Choose
            it so that, near the true parameters, fewer than 1 % of the gradients are longer. No
            release shows their number.
        noise_multiplier: z, noise std / C. 0: not private.
        expected_batch_size: B, a public constant; the sampling rate is q = B/N.
        num_data: N, a public constant. None: the number of records, if it is public (replace-one).
        accountant: where every step is charged. None: a new one for replace-one.
        data_plate: the name of the plate of records.

    Raises:
        TypeError, ValueError: an argument is out of range, or cannot be protected.

    **Privacy.** A step releases one noisy clipped sum, at a θ that depends only on earlier releases
    and public random numbers. Its event is ``PoissonSampledDpEvent(q, GaussianDpEvent(z))``,
    charged before it is drawn. Everything else is post-processing and may be published. The loss is
    not computed, because it would be a release without noise.
    """

    def __init__(
        self,
        model: Model,
        guide: AutoGuide,
        optim: PyroOptim,
        loss: Any,
        *,
        max_grad_norm: float,
        noise_multiplier: float,
        expected_batch_size: float,
        num_data: int | None = None,
        accountant: PrivacyAccountant | None = None,
        data_plate: str = "data",
    ) -> None:
        if not callable(model) or isinstance(model, type):
            raise ArgumentTypeError(f"model must be a Pyro model, a function; got {model!r}")
        _check_optim(optim)
        _check_loss(loss)
        self._accountant = budget_of(accountant, None, None)
        self._stated_num_data = None if num_data is None else positive_count(num_data, "num_data")
        self._max_grad_norm = check_clip_bound(
            "max_grad_norm", max_grad_norm, "the clip bound of a record's gradient"
        )
        self._noise_multiplier = z = noise_multiplier_or_0(noise_multiplier)
        if z and not can_hide(z * self._max_grad_norm):
            raise ArgumentError(
                f"noise_multiplier = {noise_multiplier!r} times max_grad_norm = {max_grad_norm!r}"
                " is too extreme for sums in 64-bit floats: use values nearer to 1."
            )
        self._batch_size = check_positive("expected_batch_size", expected_batch_size)
        self.model, self.guide, self.optim = model, guide, optim
        self._plate = data_plate
        self._gaussian = _GaussianGuide(guide)
        self._density: RecordDensity = _LATER
        self._saved: dict[str, Any] | None = None
        self._iterate: dict[str, Tensor] = {}
        self._average: dict[str, Tensor] = {}
        self._num_steps = 0
        self._noise = GaussianNoise()
        self._lock = Lock()  # only one thread at a time makes a step

    # -- interface of pyro.infer.SVI ---------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> float:
        """Charge one release, draw it, and move the guide's parameters.

        Args:
            args, kwargs: the model's arguments, with *all* data, in the same tensors at every step:
                this method draws the batch.

        Returns:
            NaN: the loss would be a release without noise.

        Raises:
            PrivacyBudgetExceeded: the step does not fit the budget; nothing changes.
            ValueError: model, data or optimizer do not fit; nothing was released.
            FloatingPointError: a parameter would not be finite; parameters are unchanged, the
                charge stays.
        """
        with self._lock:
            self._require_ready(args, kwargs)
            try:
                self._gaussian.put(self._iterate)
                self._step()
            finally:
                self._gaussian.put(self._average)
        return math.nan

    def run(self, num_steps: int, *args: Any, **kwargs: Any) -> None:
        """Take ``num_steps`` steps with the same ``args`` and ``kwargs``.

        Raises: as :meth:`step`; ``PrivacyBudgetExceeded`` before the first step if not all steps
            fit the budget.
        """
        positive_count(num_steps, "num_steps")
        with self._lock:
            self._require_ready(args, kwargs)
            if (left := self._accountant.remaining(self._event)) < num_steps:
                raise PrivacyBudgetExceeded(
                    f"{left} of {num_steps} steps fit the budget. No step was made: use fewer"
                    " steps, a larger noise_multiplier or a smaller expected_batch_size."
                )
            for _ in range(num_steps):
                self.step(*args, **kwargs)

    @property
    def accountant(self) -> PrivacyAccountant:
        """The accountant that every step is charged to."""
        return self._accountant

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The charges, the iterate, its average, the optimizer's state and the number of steps. It
        contains no records.
        """
        if self._density is None:
            raise StateError("there is no state before the first step.")
        used, parameters = self.optim.optim_objs, self._gaussian.parameters.values()
        with self._lock:
            optim = [[s.state_dict() for s in _parts(used[p])] for p in parameters if p in used]
            state = {
                "accountant": self._accountant.state_dict(),
                "iterate": self._iterate,
                "average": self._average,
                "optim": optim,
                "num_steps": self._num_steps,
            }
            return copy.deepcopy(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state, with fresh draws and noise. Call it before the first step,
        which raises ValueError if the accountant does not contain the charges of the saved run.
        """
        if self._density is not None:
            raise StateError("this DPSVI has already made a step: load the state into a new one.")
        with reading_state():
            self._saved = dict(state)

    def __reduce__(self) -> NoReturn:
        raise ArgumentTypeError(
            "a DPSVI contains the records, and a copy would repeat its draws: save state_dict(),"
            " and load it into a new DPSVI.",
            code="copied",
        )

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _rate(self) -> float:
        return self._batch_size / self._num_data

    @property
    def _event(self) -> DpEvent:
        event = noise_event(self._noise_multiplier)
        if self._rate == 1 or not self._noise_multiplier:
            return event
        return PoissonSampledDpEvent(self._rate, event)

    def _set_up(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the model and store the data. Nothing is released or charged."""
        with torch.no_grad():
            density = RecordDensity(
                self.model,
                args,
                kwargs,
                data_plate=self._plate,
                # most Poisson batches fit into one chunk
                rows_at_once=math.ceil(self._batch_size + 2 * math.sqrt(self._batch_size)),
                count_is_public=self._accountant.neighboring == "replace_one",
            )
        count = public_num_data(self._stated_num_data, density.num_records, self._accountant)
        if self._batch_size > count:
            raise ArgumentError(
                f"expected_batch_size = {self._batch_size:g} is larger than num_data = {count}:"
                " their ratio is the sampling rate."
            )
        with frozen_ones_kept(self.model):  # the guide runs the model
            self._gaussian.set_up(density.arguments.with_rows(density.made_up.few()), density.prior)
        _require_that_it_steps(self.optim, self._gaussian.parameters)
        self._iterate = {n: p.detach().clone() for n, p in self._gaussian.parameters.items()}
        self._average = {name: value.clone() for name, value in self._iterate.items()}
        if self._saved is not None:
            with reading_state():
                self._resume(self._saved)
        self._leaves, _ = tree_flatten((args, kwargs))  # kept, so that no other object gets its id
        self._identities = [*map(_identity, self._leaves)]
        self._num_data, self._density = count, density

    def _resume(self, saved: dict[str, Any]) -> None:
        parameters = self._gaussian.parameters
        shapes = {name: p.shape for name, p in parameters.items()}
        if {name: value.shape for name, value in saved["iterate"].items()} != shapes:
            raise CheckpointError("the saved state is of another guide or model.")
        accountant = self._accountant
        is_empty = not len(accountant)
        accountant.resume(saved["accountant"])
        if accountant.path is None and is_empty and len(accountant):
            _log.warning(
                "resumed with an accountant in memory: releases after this state was saved, or"
                " from another copy of it, are not counted. PrivacyAccountant(path=...) counts"
                " all."
            )
        self._iterate, self._average = copy.deepcopy((saved["iterate"], saved["average"]))
        self._num_steps = saved["num_steps"]
        # empty if the saved run has made no step
        for p, states in zip(parameters.values(), saved["optim"], strict=False):
            self.optim([p])  # creates its optimizer; without a gradient nothing moves
            for part, state in zip(_parts(self.optim.optim_objs[p]), states, strict=True):
                part.load_state_dict(copy.deepcopy(state))

    def _require_ready(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_inference_mode_enabled():
            raise StateError("call step() outside of torch.inference_mode(): it needs gradients.")
        if self._density is None:
            self._set_up(args, kwargs)
        self._gaussian.require_own()
        leaves, _ = tree_flatten((args, kwargs))
        if [*map(_identity, leaves)] != self._identities:
            raise ArgumentError(
                "pass all data at every step, in the same unchanged tensors: DPSVI draws the"
                " batches. For other data make a new DPSVI.",
                code="data-changed",
            )

    def _step(self) -> None:
        prior = self._density.prior
        with torch.enable_grad():
            drawn, entropy = self._drawn()
        theta = drawn.detach().to(prior.device, prior.dtype)
        _, prior_gradient = prior.log_density_and_gradient(theta)
        with torch.no_grad():
            gradient = self._released(theta)
            outer = gradient - prior_gradient.to(gradient)
        parameters = self._gaussian.parameters
        values = list(parameters.values())
        slopes = [outer.to(drawn), torch.full_like(entropy, -1.0)]
        gradients = torch.autograd.grad([drawn, entropy], values, slopes, allow_unused=True)
        try:
            for p, found in zip(values, gradients, strict=True):
                p.grad = found
            self.optim(values)
        finally:
            for p in values:
                p.grad = None
        if not all(bool(p.isfinite().all()) for p in values):
            raise DivergedError(
                "after this step the guide's parameters would not be finite; they are unchanged:"
                " use a smaller learning rate."
            )
        weight = (_RECENT + 1) / (self._num_steps + _RECENT)
        for name, p in parameters.items():
            self._iterate[name] = p.detach().clone()
            self._average[name].lerp_(self._iterate[name], weight)

    def _drawn(self) -> tuple[Tensor, Tensor]:
        """A draw θ at which the model can be evaluated, whatever the records are; the entropy."""
        prior = self._density.prior
        for _ in range(_DRAWS):
            theta, entropy = self._gaussian.draw()
            point = theta.detach().to(prior.device, prior.dtype)
            if bool(point.isfinite().all()) and self._density.has_gradients(point):
                return theta, entropy
        raise ArgumentError(
            f"the model cannot be evaluated at any of {_DRAWS} draws of the guide: use"
            " init_loc_fn= with public values, a smaller init_scale= or learning rate.",
            code="pyro-start",
        )

    def _released(self, theta: Tensor) -> Tensor:
        """The noisy gradient of −Σ log p(x_i | θ), in float64. At θ synthetic records must have
        gradients: otherwise one record could stop the sum.
        """
        require_single_process()
        self._accountant.compose(self._event, label="DPSVI")
        if not self._num_steps:
            self._accountant.note(f"DPSVI: records are kept apart {_INDEPENDENCE}")
        # a new sampler for every step: no draw is used twice
        records = next(iter(PoissonSampler(self._density.num_records, self._rate, None, 0)))
        drawn = self._density.of(torch.tensor(records, dtype=torch.long))
        total = drawn.clipped_gradient_sum(theta, self._max_grad_norm)
        noise = self._noise.standard_normal(len(total), dtype=total.dtype, device=total.device)
        self._num_steps += 1
        std = self._noise_multiplier * self._max_grad_norm
        return (std * noise - total) / self._rate


class _GaussianGuide:
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
        self._guide = guide

    def set_up(self, call: Call, prior: Prior) -> None:
        """Create the guide's parameters from synthetic records. Refuse a guide whose latents are
        not those of ``prior``.
        """
        guide, store = self._guide, pyro.get_param_store()
        if guide.prototype_trace is not None:
            raise ArgumentError(
                "the guide was used before, so its parameters may come from the data: pass a new"
                " one, and start values as init_loc_fn=.",
                code="pyro-guide",
            )
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


def _check_optim(optim: Any) -> None:
    if not isinstance(optim, PyroOptim):
        raise ArgumentTypeError(f"optim must be one of pyro.optim's optimizers, got {optim!r}")
    if callable(optim.pt_optim_args) or callable(optim.pt_clip_args):
        raise ArgumentTypeError(
            "optim computes its arguments by parameter: pass a dict instead, Adam({'lr': 0.01})."
        )
    if optim.optim_objs or getattr(optim, _WAITING):
        raise ArgumentError(
            "the optimizer was used before, and its state may come from data: pass a new one.",
            code="pyro-guide",
        )


def _require_that_it_steps(optim: PyroOptim, parameters: Mapping[str, Tensor]) -> None:
    """Refuse an optimizer that would fail after the first charge: test it on similar parameters."""
    for name, parameter in parameters.items():
        made_up = nn.Parameter(torch.ones_like(parameter))
        made_up.grad = torch.ones_like(made_up)
        try:
            copy.deepcopy(optim)([made_up])
        except Exception as error:
            kind = getattr(optim.pt_optim_constructor, "__name__", optim.pt_optim_constructor)
            raise ArgumentError(
                f"optim cannot step the guide's {name!r}: {kind}: {error}. Nothing was charged."
                " Make a new guide and DPSVI with another, such as pyro.optim.Adam({'lr': 0.01})."
            ) from error


def _check_loss(loss: Any) -> None:
    if type(loss) not in _ELBO:
        names = ", ".join(kind.__name__ for kind in _ELBO)
        raise ArgumentTypeError(f"loss must be an ELBO, one of {names}; got {type(loss).__name__}.")
    if loss.num_particles != 1:
        raise ArgumentError(
            f"num_particles = {loss.num_particles} needs one release per particle: use 1."
        )


def _parts(optimizer: Any) -> list[Any]:
    """A torch optimizer, or a scheduler and its optimizer."""
    return [optimizer, *([optimizer.optimizer] if hasattr(optimizer, "optimizer") else [])]


def _identity(leaf: Any) -> tuple[Any, ...]:
    """Equal for two arguments if they are the same data: for a tensor, its memory and the number of
    writes to it, not its values.
    """
    if isinstance(leaf, Tensor):
        written = 0 if leaf.is_inference() else leaf._version
        return leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype, leaf.device, written
    return type(leaf), leaf if isinstance(leaf, int | float | str) else id(leaf)
