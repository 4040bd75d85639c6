"""The base class of all private kernels: Pyro's contract, charges, public randomness, and the draws
so far.

One iteration of a kernel charges everything that it is going to release, draws the noise, and
accepts or rejects. Warm-up iterations, rejected proposals and every chain are charged, too.
Everything that is computed from the noisy numbers is post-processing.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from torch import Tensor

from .. import words
from ..accounting import events
from ..accounting.accountant import PrivacyAccountant
from ..density import InvalidPoint, Model, Prior, RecordDensity, UnfitModel, clipped_ratio_sum
from ..density.pyro_runs import using_pyro
from ..errors import ArgumentError, ArgumentTypeError, StateError
from ..noise import GaussianNoise, can_hide, check_clip_bound
from .mixing import complaint_of, mixing_of
from .proposals import Moves, RandomWalk, free_move

if TYPE_CHECKING:
    from .multi_owner import ManyOwners

_LATER: Any = None  # the value before setup()
_DRAWS = 100
_UNIFORMS = 64  # drawn at a time

Draw = dict[str, Tensor]  # values by site
Start = Draw | None  # where a chain starts; None: the user did not say


class Candidate(NamedTuple):
    """The proposed point of an iteration, and what its noisy Metropolis test needs."""

    theta: Tensor
    log_prior: float
    log_ratio: float  # the sum over records, exact and clipped. Private data
    rest: float  # ratios of the prior and of the proposal, kinetic energies
    bound: float  # how far one record can move log_ratio. 0: it does not depend on records
    kept: dict[str, Any]  # attributes of the kernel that change with θ
    # public part of the log ratio, apart: if it is huge, it would round away the noise
    known: float = 0.0


class PrivateKernel(MCMCKernel):
    """Base class of the private kernels. A subclass states what an iteration releases, and
    proposes points.

    Every iteration is charged to ``accountant``. For parallel chains it needs ``path=``, a ledger
    that processes share. Warm-up adapts the scale of the moves to ``target_accept_prob``. For this
    it uses only the noisy accept decisions.

    **Privacy.** The charges cover draws, accept decisions and noisy log-likelihood ratios: you may
    publish them. From :meth:`setup` until :meth:`cleanup` the kernel keeps the data, in private
    attributes that are never pickled. Random numbers come from the operating system: Pyro's and
    torch's seeds do not repeat a run and do not reveal its noise.
    """

    _owners: ManyOwners | None = None  # None: one owner has all records
    save_params: list[str]  # Pyro's: sites whose draws are kept; exists only if it was set
    # arguments that ``repr`` shows, and the attributes that have their values
    _told: tuple[tuple[str, str], ...] = ()

    def __init__(
        self,
        model: Model,
        accountant: PrivacyAccountant,
        target_accept_prob: float | None,
        moves: Moves,
    ) -> None:
        if not isinstance(accountant, PrivacyAccountant):
            raise ArgumentTypeError(
                f"accountant must be a PrivacyAccountant, got {accountant!r}: every iteration is"
                " charged to it."
            )
        if target_accept_prob is not None and not 0 < target_accept_prob < 1:
            raise ArgumentError(
                f"target_accept_prob must lie in (0, 1) or be None, got {target_accept_prob!r}."
            )
        super().__init__()
        self.model = model
        # for each site the map from its distribution's support to unconstrained space
        self.transforms: dict[str, Any] | None = None
        self._accountant = accountant
        self._target = target_accept_prob if moves.proposal is None else None
        self._moves = moves
        self._initial: Start = None
        self._starts_given = 0  # how often initial_params was set since the last setup()
        self._chains: list[list[Draw]] = []
        self._run_begin, self._is_run = 0, False
        self._begin()
        self._forget()

    def _begin(self) -> None:
        self._log_ratios: list[float] = []
        self._log_scale = 0.0
        self._shown = 0, ""  # iteration and ε of the progress bar
        self._accepted = self._iteration = self._counted = self._warmup_steps = 0

    def _forget(self) -> None:
        """Delete what depends on the data without a charge, and what belongs to this process.
        Neither is pickled.
        """
        self._prior: Prior = _LATER
        self._density: RecordDensity = _LATER
        self._terms: Tensor | None = None  # the records' terms at the chain's current point
        self._noise: GaussianNoise = _LATER
        self._public: GaussianNoise = _LATER
        self._theta: Tensor = _LATER
        # indices of the coordinates of θ on which records' terms depend, and of the others
        self._read = self._unread = torch.empty(0, dtype=torch.int64)
        self._log_prior, self._started = 0.0, False

    @property
    def _numbers(self) -> dict[str, Any]:
        return {argument: getattr(self, kept) for argument, kept in self._told}

    def __repr__(self) -> str:
        return words.one_line(self, self._numbers, self._accountant)

    def _repr_html_(self) -> str:
        return words.html(self, self._numbers, self._accountant)

    # -- what an algorithm's file provides ---------------------------------------------------------

    _multiplier: float  # noise multiplier of the log ratio
    _needs_gradients = False

    def _read_records(self, log_ratio_slope: float, data_plate: str) -> None:
        """Settings of a kernel whose likelihood is a Pyro model."""
        what = "a bound on a record's |log-likelihood ratio| per unit of distance"
        self._slope = check_clip_bound("log_ratio_slope", log_ratio_slope, what)
        self._plate = data_plate

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prior:
        """Check the model and store the data. Nothing is released or charged."""
        self._density = RecordDensity(
            self.model,
            args,
            kwargs,
            data_plate=self._plate,
            gradients=self._needs_gradients,
            count_is_public=self._accountant.neighboring == "replace_one" and self._owners is None,
        )
        return self._density.prior

    def _start(self, theta: Tensor) -> None:
        """A chain starts at ``theta``, or the caller has moved it there."""
        self._terms = None

    def _charges(self) -> list[tuple[events.DpEvent, int]]:
        """The events of the next iteration: of the noisy log ratio, and of the move."""
        proposal = self._moves.proposal
        moves = [] if proposal is None else [(proposal.event, 1)]
        return [(events.noise_event(self._multiplier), 1), *moves]

    @abstractmethod
    def _candidate(self, theta: Tensor) -> Candidate:
        """Propose a point from ``theta``. The iteration is charged already.

        Raises:
            InvalidPoint: the model cannot be evaluated there, whatever the data are.
        """

    def _reads(self, prior: Prior) -> Tensor:
        """Whether records' terms depend on a coordinate of θ, ``[dimension]``."""
        return self._density.read

    def _is_valid(self, theta: Tensor) -> bool:
        """Whether the likelihood can be evaluated at ``theta``, whatever the data are."""
        density = self._density
        return density.has_gradients(theta) if self._needs_gradients else density.is_valid(theta)

    # -- Pyro's contract ---------------------------------------------------------------------------

    @property
    def accountant(self) -> PrivacyAccountant:
        """The accountant that every iteration is charged to."""
        return self._accountant

    @property
    def initial_params(self) -> Start:
        """The chain's start in unconstrained space: the user's, or else a draw from the prior.
        It does not depend on the data.
        """
        if self._initial is not None or self._prior is None or self._theta is None:
            return self._initial
        return self._prior.unflatten(self._theta)

    @initial_params.setter
    def initial_params(self, params: Start) -> None:
        self._initial, self._starts_given = params, self._starts_given + 1

    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        """Pyro calls this at the start of every chain, and once more after parallel chains.
        It releases and charges nothing.

        Raises:
            ValueError: the model or the data are not fit for record-wise clipping, see
                :class:`RecordDensity`, or the start is not finite.
        """
        if self._starts_given > 1:
            raise StateError(
                "initial_params was set more than once before a chain began: Pyro would start all"
                " parallel chains at the last one. Use torch_dpbayes.mcmc.MCMC."
            )
        self._starts_given = 0
        self._begin()
        self._forget()
        if not self._is_run:
            self._run_begin = len(self._chains)
        self._warmup_steps = warmup_steps
        owners = self._owners
        with using_pyro, owners.running(begins=True) if owners else nullcontext(), torch.no_grad():
            self._set_up(args, kwargs)
            given = None if self._initial is None else self._prior.flatten(self._initial)
            if given is not None:
                self._require_start(given)
            if owners:
                settings = {
                    "target_accept_prob": self._target,
                    "warmup_steps": warmup_steps,
                    "save_params": getattr(self, "save_params", None),
                    "initial_params": given,
                }
                owners.compare(self._density, settings)
            self._theta = self._first_point(given)

    def _set_up(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        prior = self._prepare(args, kwargs)
        if names := getattr(self, "save_params", ()):
            if isinstance(names, str) or set(names) - set(prior.transforms):
                raise ArgumentError(
                    f"save_params must be a list of names out of {sorted(prior.transforms)}, got"
                    f" {names!r}."
                )
            self.save_params = sorted(set(names))  # in another order Pyro would mislabel them
        self._prior, self.transforms = prior, prior.transforms
        is_read = self._reads(prior)
        if not is_read.any():  # then all latents are moved as if records read them
            is_read = ~is_read
        self._read, self._unread = (
            places.nonzero()[:, 0].to(prior.device) for places in (is_read, ~is_read)
        )
        self._moves.require_dimension(len(self._read))
        self._noise, self._public = GaussianNoise(), GaussianNoise()

    def _first_point(self, given: Tensor | None) -> Tensor:
        for _ in range(_DRAWS):
            theta = self._prior.sample() if given is None else given
            if self._owners:
                theta = self._owners.of_first(theta)
            can_start = self._can_start(theta)
            if self._owners.all_have(can_start) if self._owners else can_start:
                return theta
        raise ArgumentError(
            f"the model cannot be evaluated at any of {_DRAWS} draws from its prior: pass"
            " initial_params= to MCMC, chosen without the data.",
            code="pyro-start",
        )

    def sample(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """Charge one iteration, then run it.

        Raises:
            PrivacyBudgetExceeded: the iteration does not fit into the budget; nothing was released.
                :meth:`get_samples` returns the draws so far.
        """
        owners = self._owners
        # only one thread at a time: an iteration releases exactly what it charged
        with using_pyro, owners.running() if owners else nullcontext(), torch.no_grad():
            if self._public is None:
                raise StateError(
                    "sample() before setup(): run the kernel with pyro.infer.MCMC(kernel,"
                    " ...).run(data)."
                )
            theta = self._prior.flatten(params)
            if not self._started or not torch.equal(theta, self._theta):
                self._require_start(theta)
                self._share_public_numbers(0)
                self._start(theta)
                self._theta, self._log_prior, self._started = theta, self._log_prior_at(theta), True
            theta, event = self._theta, self._event()
            if owners:
                theta = owners.agreed_point(theta, self._accepted, event, self._accountant)
            self._share_public_numbers(1)
            self._accountant.compose(event, label=type(self).__name__)
            try:
                candidate = self._candidate(theta)
            except InvalidPoint:
                candidate = None
            accepted, log_ratio = self._metropolis(candidate)
            self._theta = theta
            if candidate is not None and accepted:
                self._theta, self._log_prior = candidate.theta, candidate.log_prior
                self.__dict__.update(candidate.kept)
            self._move_for_free()
            self._record(accepted, log_ratio)
            return self._prior.unflatten(self._theta.clone())

    def _move_for_free(self) -> None:
        """Move the latents that no record reads, given the others. The likelihood does not depend
        on them, so their conditional law is the prior's: the posterior is invariant under the move,
        which costs nothing.
        """
        self._share_public_numbers(2)
        self._theta, self._log_prior = free_move(
            self._log_prior_at, self._theta, self._log_prior, self._unread, self._uniforms()
        )

    def _share_public_numbers(self, stage: int) -> None:
        """All owners draw the same proposals, momenta and thresholds. ``stage``: 0 at the start of
        a chain, 1 in an iteration, 2 in the free move after it.
        """
        if self._owners:
            self._public = self._owners.public_numbers(self._iteration, stage)

    def _uniforms(self) -> Iterator[float]:
        """Public numbers in (0, 1)."""
        while True:
            yield from torch.special.ndtr(_normals(self._public, _UNIFORMS)).tolist()

    def _can_start(self, theta: Tensor) -> bool:
        return math.isfinite(self._log_prior_at(theta)) and self._is_valid(theta)

    def _require_start(self, theta: Tensor) -> None:
        """Refuse a point without density: a chain would stay there, and be charged."""
        if not self._can_start(theta):
            raise ArgumentError(
                "at the start the prior has no density or the model cannot be evaluated: pass"
                " other initial_params=, in unconstrained space, for example zeros.",
                code="pyro-start",
            )

    def _record(self, accepted: bool, log_ratio: float) -> None:
        self._log_ratios.append(log_ratio)
        self._iteration += 1
        if self._iteration <= self._warmup_steps:
            if self._target is not None:
                self._log_scale += (accepted - self._target) * self._iteration**-0.6
            if self._iteration == self._warmup_steps:
                self._accepted = self._counted = 0
                return
        self._accepted += accepted
        self._counted += 1
        if self._iteration > self._warmup_steps:
            values = self._prior.constrain(self._theta)
            names = getattr(self, "save_params", None) or values
            draw = {name: values[name].detach().cpu().clone() for name in names}
            if self._iteration == self._warmup_steps + 1:
                self._chains.append([])
            self._chains[-1].append(draw)

    def cleanup(self) -> None:
        """Pyro calls this at the end of a chain. It deletes the data and the start point, and
        returns unused reservations to the ledger.
        """
        if self._owners:
            self._owners.end_chain()
        is_first = self._started  # Pyro calls it twice
        self._forget()
        self._initial, self._starts_given = None, 0
        if self._accountant.path is not None:
            self._accountant.close()
        if is_first and not self._is_run:
            complaint = complaint_of(mixing_of(self._draws_of_last_run(), self.transforms))
            if complaint is not None:
                warnings.warn(complaint, stacklevel=2)

    def logging(self) -> OrderedDict[str, str]:
        """For the progress bar: ε, scale and rate of noisy acceptances; no exact sums."""
        computed, epsilon = self._shown
        if self._iteration < 1.25 * computed:  # computing ε may take long
            epsilon = f"> {epsilon}"
        else:
            delta = 1e-5 if self._accountant.delta is None else self._accountant.delta
            epsilon = f"{self._accountant.get_epsilon(delta):.3g}"
            self._shown = self._iteration, epsilon
        rate = f"{self._accepted / max(self._counted, 1):.3f}"
        return OrderedDict(epsilon=epsilon) | {"step size": f"{self._scale:.2e}", "acc. rate": rate}

    def diagnostics(self) -> dict[str, Any]:
        """Diagnostics of the running chain. After the run: those of the last run of
        :class:`MCMC`, or of the last chain of Pyro's MCMC. They are the rate of noisy acceptances
        after warm-up (of the last chain; NaN for parallel chains), the positions of draws after
        divergent moves, the noisy log-likelihood ratios of all iterations, split R-hat and
        effective sample size.
        """
        after_warmup = self._log_ratios[self._warmup_steps :]
        return {
            "acceptance rate": self._accepted / self._counted if self._counted else math.nan,
            "divergences": [k for k, ratio in enumerate(after_warmup) if math.isnan(ratio)],
            "noisy log ratios": list(self._log_ratios),
            **mixing_of(self._draws_of_last_run(), self.transforms),
        }

    def get_samples(self, group_by_chain: bool = False) -> Any:
        """The draws after warm-up of all chains of this kernel, also if the budget or Ctrl-C ended
        them.

        After an exception ``MCMC.run`` loses its draws, although they were charged. This method
        returns them (draws of parallel chains only if :class:`MCMC` ran them). Afterwards call
        :meth:`cleanup` to delete the data.

        Args:
            group_by_chain: return a list with a dict for each chain, instead of one dict with all
                draws. Chains may differ in length.

        Returns:
            values by site, in the supports of the model's distributions, (number of draws, ...).
        """
        if group_by_chain:
            return [_stacked(chain) for chain in self._chains if chain]
        together = [draw for chain in self._chains for draw in chain]
        return _stacked(together) if together else {}

    def __getstate__(self) -> dict[str, Any]:
        blank = object.__new__(type(self))
        blank._forget()
        return {**self.__dict__, **blank.__dict__}

    @contextmanager
    def in_run(self) -> Iterator[None]:
        """For :class:`MCMC`: chains inside belong to one run."""
        self._run_begin, self._is_run = len(self._chains), True
        try:
            yield
        finally:
            self._is_run = False

    def begin_chains(self, count: int) -> list[list[Draw]]:
        """For :class:`MCMC`: lists for the draws of parallel chains."""
        begun: list[list[Draw]] = [[] for _ in range(count)]
        self._chains += begun
        return begun

    def start_at(self, start: Start) -> None:
        """For :class:`MCMC`: set the start of a parallel chain. None: keep ``initial_params``."""
        self._initial = self._initial if start is None else start

    @property
    def newest_draw(self) -> Draw | None:
        """For :class:`MCMC`: the newest draw of the running chain; None in warm-up."""
        return self._chains[-1][-1] if self._iteration > self._warmup_steps else None

    def _draws_of_last_run(self) -> list[Draw]:
        return [_stacked(chain) for chain in self._chains[self._run_begin :] if chain]

    # -- parts of an iteration ---------------------------------------------------------------------

    @property
    def _scale(self) -> float:
        return self._moves.scale * math.exp(self._log_scale)

    def _event(self) -> events.DpEvent:
        """The event of everything that the next iteration releases."""
        parts = [events.SelfComposedDpEvent(event, n) for event, n in self._charges() if n]
        return events.ComposedDpEvent(parts)

    def _gaussian(self, size: int, public: bool = False) -> Tensor:
        """Standard normal numbers: float64 if they hide a sum over records, which is float64, too;
        of θ's dtype if they are public.
        """
        source = self._public if public else self._noise
        return source.standard_normal(
            size, dtype=self._prior.dtype if public else torch.float64, device=self._prior.device
        )

    def _standard_normal(self, public: bool = False) -> float:
        return float(_normals(self._public if public else self._noise, 1))

    def _propose(self, walk: RandomWalk, theta: Tensor) -> tuple[Tensor, float]:
        """θ' and log q(θ | θ') − log q(θ' | θ). A random walk moves only the coordinates that
        records read.
        """
        if walk.proposal is None:
            step = walk.step(self._gaussian(len(self._read), public=True))
            moved = theta.clone()
            moved[self._read] += math.exp(self._log_scale) * step
            return moved, 0.0
        params, ratio = walk.proposal.propose(self._prior.unflatten(theta.clone()))
        return self._prior.flatten(params), float(ratio)

    def _ratio(self, theta: Tensor, moved: Tensor) -> tuple[float, float, dict[str, Any]]:
        """The sum of the records' clipped log ratios; their clip bound, slope × distance in the
        coordinates that records read; and what the kernel keeps if it accepts ``moved``.
        """
        if self._terms is None:
            self._terms = self._density.log_likelihoods(theta)
        terms = self._density.log_likelihoods(moved)
        distance = torch.linalg.vector_norm((moved - theta)[self._read].double())
        bound = self._slope * float(distance)
        return clipped_ratio_sum(self._terms, terms, bound), bound, {"_terms": terms}

    def _metropolis(self, candidate: Candidate | None) -> tuple[bool, float]:
        """Whether log u < R̃ + rest − std²/2, and R̃ = log ratio + noise with std =
        multiplier·bound. NaN rejects. All owners reject a point that is invalid for one owner, or
        where noise cannot hide a record.
        """
        noisy, threshold = 0.0, 0.0
        is_valid = candidate is not None and self._is_hidden(candidate.bound)
        if candidate is not None and is_valid:
            std = self._multiplier * candidate.bound
            noisy = candidate.log_ratio + (std * self._standard_normal() if std else 0.0)
            noisy += candidate.known
            normal = torch.tensor(self._standard_normal(public=True), dtype=torch.float64)
            variance = (self._total_multiplier * candidate.bound) ** 2
            threshold = float(torch.special.log_ndtr(normal)) - candidate.rest + variance / 2
        if self._owners:
            noisy, threshold, is_valid = self._owners.together(noisy, threshold, is_valid)
        return (noisy > threshold, noisy) if is_valid else (False, math.nan)

    @property
    def _total_multiplier(self) -> float:
        return self._multiplier if self._owners is None else self._owners.total_multiplier

    def _is_hidden(self, bound: float) -> bool:
        """Whether the noise can hide the effect of one record on the log ratio."""
        own, total = self._multiplier, self._total_multiplier
        if not own or (not bound and self._owners is None):
            return True
        return all(map(can_hide, (bound, own * bound, total * bound)))

    def _log_prior_there(self, theta: Tensor) -> float:
        """log p(θ). InvalidPoint: it is not finite."""
        value = self._log_prior_at(theta)
        if not math.isfinite(value):
            raise InvalidPoint
        return value

    def _log_prior_at(self, theta: Tensor) -> float:
        """log p(θ), or −inf if the model cannot be evaluated."""
        if not theta.isfinite().all():
            return -math.inf
        try:
            value = self._prior.log_density(theta)
        except UnfitModel:
            raise
        except Exception:  # the error depends on θ alone
            return -math.inf
        return value if not math.isnan(value) else -math.inf


def _normals(source: GaussianNoise, size: int) -> Tensor:
    return source.standard_normal(size, dtype=torch.float64, device=torch.device("cpu"))


def _stacked(chain: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([draw[name] for draw in chain]) for name in chain[0]}
