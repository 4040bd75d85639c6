r"""Chains over data that lie with several owners, who do not show them to each other.

Every owner is a rank of a ``torch.distributed`` process group, with its own records, its own
accountant and its own noise. In an iteration a rank sends its clipped sum with its own noise on it,
and nothing else that stems from records. All ranks compute everything else alike, from randomness
that they share, and hence draw the same samples.

**Who sees what.** Each owner is protected against all others together, whatever they do: read what
passes through them (in a ring each rank receives partial sums of the ranks before it, and the first
of these is what one owner sent), pool what they saw and subtract their own sums and noise, or send
anything at all instead of what they should. For what an owner sends is the same Gaussian mechanism
for every θ and θ', its noise alone gives the multiplier that it is charged with, and its own
accountant counts. The noise of the others protects it too, against those who see the samples only,
but no ε takes credit for that. The *samples* are right only if all owners follow the protocol.

**What is not protected.** That an owner takes part; when its budget ends; how long it computes,
which hints at the number of its records; and what is compared at set-up: settings, noise
multipliers, shapes and types of the data but for the number of records, densities on made-up
records. A person with records at several owners is released by each of them: such losses add up
over the owners' accountants. Process groups neither encrypt nor authenticate: run them inside a
private network. What others send is read as numbers and text, and never unpickled.

**In step.** Every message is one ``all_reduce`` of the same length. In it each rank says where it
is, so that a rank that fails, has no budget left, or runs something else, is known to all in the
same message, and none waits for it. A rank that is interrupted between two iterations, in Pyro's
code, says so when its process ends or ``kernel.cleanup()`` is called; one that says nothing any
more, when the group's timeout is over.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import pyro
import torch
import torch.distributed as dist
from torch import Tensor

from .. import __version__
from ..accounting import events
from ..accounting.accountant import PrivacyAccountant, PrivacyBudgetExceeded
from ..noise import GaussianNoise
from .density import InvalidPoint, Model, Prior, RecordDensity, without_value_checks
from .density.arguments import filled_if_empty
from .hmc import DPHMC
from .kernel import Outcome, PrivateKernel, can_hide
from .penalty import DPPenalty

_ROOM = 256  # numbers in a message, after one for each rank
_LONGEST_TEXT = 2**16
_PLACES = 16
_COMPARED_ROWS = 5
_DRAWS = 100
_CHARGED = "What was charged stays charged; the draws so far are in kernel.get_samples()."


class _Place(IntEnum):
    """Where in the protocol a rank is."""

    SET_UP = 1
    ITERATE = 2
    GRADIENT = 3
    RATIO = 4
    NO_BUDGET = 5
    FAILED = 6
    ENDED = 7


class _Owners:
    """The other ranks. ``live``: they count on another message of this one."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "there is no process group: start one process for each owner (torchrun, or the"
                ' cluster\'s launcher) and call torch.distributed.init_process_group("gloo",'
                " timeout=...) in each before the kernel is made."
            )
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise RuntimeError(
                "this process is not in process_group=: make the kernel in the processes of its"
                " owners only."
            )
        on_cpu = "cpu:" in dist.get_backend_config(group)
        self._device = (
            torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
        )
        self._pid = os.getpid()
        self.names = [f"owner {rank}" for rank in range(self.size)]
        self.live = False

    @property
    def is_here(self) -> bool:
        """Whether this is the process that is in the group; its forks are not."""
        return os.getpid() == self._pid

    def sum(self, place: _Place, iteration: int, values: Tensor) -> Tensor:
        """Σ over the ranks of ``values`` (n,) in float64; all ranks get the same bits.

        Raises:
            PrivacyBudgetExceeded: a rank cannot pay for the iteration.
            RuntimeError: a rank has failed, ended, is somewhere else, or cannot be reached.
        """
        values = values.detach().reshape(-1).to("cpu", torch.float64)
        sums = [self._reduce(place, iteration, piece) for piece in values.split(_ROOM)]
        return torch.cat(sums)

    def leave(self, place: _Place, iteration: int) -> None:
        """Tell the others in their next message, whatever they are at, that this rank does
        not go on.
        """
        if self.live and self.is_here:
            try:
                self._reduce(place, iteration, torch.empty(0))
            except RuntimeError:  # what the others say no longer matters here
                pass
            self.live = False

    def _reduce(self, place: _Place, iteration: int, piece: Tensor) -> Tensor:
        message = torch.zeros(self.size + _ROOM, dtype=torch.float64)
        message[self.rank] = place + _PLACES * iteration
        message[self.size : self.size + len(piece)] = piece
        message = message.to(self._device)
        try:
            dist.all_reduce(message, group=self._group)
        except RuntimeError as error:
            self.live = False
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RuntimeError(
                "the other owners cannot be reached: a process died, stalled for longer than the"
                f" process group's timeout, or the connection broke. {_CHARGED} To go on, start the"
                f" processes of all owners again, with initial_params= at the last draw. ({reason})"
            ) from error
        message = message.cpu()
        self._require_together(message[: self.size].tolist(), place, iteration)
        return message[self.size : self.size + len(piece)]

    def _require_together(self, found: list[float], place: _Place, iteration: int) -> None:
        if len(set(found)) == 1 and place not in (_Place.NO_BUDGET, _Place.FAILED):
            return
        self.live = False
        at: dict[int, list[int]] = {}
        for rank, code in enumerate(found):
            at.setdefault(int(code) % _PLACES if math.isfinite(code) else 0, []).append(rank)
        if failed := at.get(_Place.FAILED):
            raise RuntimeError(
                f"{self.listed(failed)} failed, so all owners stop; the reason stands in that"
                f" process. {_CHARGED}"
            )
        if broke := at.get(_Place.NO_BUDGET):
            raise PrivacyBudgetExceeded(
                f"the budget of {self.listed(broke)} does not allow for iteration {iteration + 1},"
                " so all owners stop. "
                + (
                    "Nothing of it was released. The draws so far are in kernel.get_samples()."
                    if place is _Place.ITERATE
                    else _CHARGED
                )
            )
        if (ended := at.get(_Place.ENDED)) and place is not _Place.ENDED:
            raise RuntimeError(
                f"{self.listed(ended)} ended the run after {int(found[ended[0]]) // _PLACES}"
                " iterations, and others want more: give all owners the same num_samples and"
                f" num_chains. {_CHARGED}"
            )
        raise RuntimeError(
            f"the owners are not in step: this one is at {place.name}, iteration {iteration + 1},"
            " and others elsewhere. Run the same program on all ranks, and let nothing else use"
            f" the process group meanwhile. {_CHARGED}"
        )

    def of_first(self, place: _Place, iteration: int, values: Tensor) -> Tensor:
        """The first rank's ``values``, on all ranks."""
        return self.sum(
            place, iteration, values if self.rank == 0 else torch.zeros_like(values)
        ).reshape(values.shape)

    def which(self, flag: bool) -> list[int]:
        """At set-up, the ranks whose ``flag`` is set, on all ranks."""
        flags = torch.zeros(self.size)
        flags[self.rank] = flag
        return [rank for rank, found in enumerate(self.sum(_Place.SET_UP, 0, flags)) if found]

    def texts(self, own: str) -> list[str]:
        """Every rank's text."""
        encoded = torch.frombuffer(bytearray(own.encode()), dtype=torch.uint8)
        lengths = torch.zeros(self.size)
        lengths[self.rank] = len(encoded)
        sizes = [int(size) for size in self.sum(_Place.SET_UP, 0, lengths)]
        if not 0 < min(sizes) <= max(sizes) <= _LONGEST_TEXT:
            raise RuntimeError(
                "an owner's settings have no sensible length: run the same version of this library"
                " on all ranks."
            )
        found = []
        for rank, size in enumerate(sizes):
            text = self.sum(_Place.SET_UP, 0, encoded if rank == self.rank else torch.zeros(size))
            found.append(bytes(text.to(torch.uint8).tolist()).decode())
        return found

    def listed(self, ranks: Sequence[int]) -> str:
        return " and ".join(self.names[rank] for rank in ranks)


class _SharedRandomness(GaussianNoise):
    """Standard normal numbers that all ranks draw alike. They hide nothing."""

    def __init__(self, *seed: int) -> None:
        super().__init__()
        self._random = np.random.default_rng(seed)

    def standard_normal(
        self, size: int, *, dtype: torch.dtype, device: torch.device, hides: Any = ()
    ) -> Tensor:
        return torch.from_numpy(self._random.standard_normal(size)).to(device, dtype)


class _OwnedKernel(PrivateKernel):
    """What the kernels below add to those for one owner: sums are sums over the owners, and
    everything else is the same for all of them.
    """

    _owners: _Owners | None
    _density: RecordDensity | None

    def _join(self, owner: str | None, group: dist.ProcessGroup | None) -> None:
        """At the end of the constructor."""
        for name, value in self._own_noise().items():
            if not value:
                raise ValueError(
                    f"{name} must be positive: without noise of its own an owner sends the exact"
                    " sum over its records to the others."
                )
        if owner is not None and (
            not isinstance(owner, str) or not 0 < len(owner) <= 100 or not owner.isprintable()
        ):
            raise ValueError(
                "owner must be a name that the other owners may see, of at most 100 printable"
                f" characters; got {owner!r}."
            )
        self._owners, self._name = _Owners(group), owner
        self._seed, self._tested = 0, False
        self._total_noise: dict[str, float] = {}

    @abstractmethod
    def _own_noise(self) -> dict[str, float]:
        """This owner's noise multipliers by argument, that of the log ratio first."""

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """What has to be the same for all owners."""

    if TYPE_CHECKING:  # of the kernels for one owner

        def _charges(self) -> list[tuple[events.DpEvent, int]]: ...

    def _private_state(self) -> tuple[str, ...]:
        return (*super()._private_state(), "_owners")

    # -- set-up ------------------------------------------------------------------------------------

    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        """Called by Pyro at the start of every chain, on all ranks. Compares what has to be the
        same, and agrees on a seed and a start.

        Raises:
            ValueError: this owner's model or data are not fit, or the owners differ; nothing was
                released.
            RuntimeError: another owner could not set up, or cannot be reached.
        """
        owners = self._require_here()
        problem: BaseException | None = None
        given = self._initial is not None
        try:
            super().setup(warmup_steps, *args, **kwargs)
            facts = self._facts(warmup_steps, given)
        except BaseException as error:
            problem, facts = error, {"failed": True}
        owners.live = True
        with self._telling_the_others():
            everyone = self._read(owners.texts(json.dumps({"owner": self._name, **facts})))
            if failed := [rank for rank, theirs in enumerate(everyone) if "failed" in theirs]:
                owners.live = False
                raise problem or RuntimeError(
                    f"{owners.listed(failed)} could not set up, so all owners stop; the reason"
                    " stands in that process. Nothing was released."
                )
            self._compare(everyone)
            self._compare_densities()
            entropy = "".join(theirs["entropy"] for theirs in everyone)
            self._seed = int.from_bytes(hashlib.sha256(entropy.encode()).digest(), "little")
            noises = [theirs["noise"] for theirs in everyone]
            self._total_noise = {
                name: math.hypot(*(float(noise[name]) for noise in noises))
                for name in self._own_noise()
            }
            with torch.no_grad():
                self._agree_on_start(given)

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prior:
        (args, kwargs), is_empty = filled_if_empty(args, kwargs)
        prior = super()._prepare(args, kwargs)  # type: ignore[safe-super]
        if is_empty:
            assert self._density is not None
            self._density.leave_out_all_records()
        return prior

    def _facts(self, warmup_steps: int, given: bool) -> dict[str, Any]:
        """What is told to the other owners: no function of the records, nor of their number."""
        assert self._prior is not None and self._theta is not None and self._density is not None
        density = self._density
        return {
            "versions": {
                "torch_dpbayes": __version__,
                "torch": torch.__version__,
                "pyro": pyro.__version__,
            },
            "settings": {
                "kernel": type(self).__name__,
                **self._settings(),
                "target_accept_prob": self._target,
                "warmup_steps": warmup_steps,
                "save_params": self._saved,
                "initial_params given": given,
            },
            "model": {
                "latents": {
                    name: list(value.shape)
                    for name, value in self._prior.unflatten(self._theta).items()
                },
                "data": density.described_data(),
            },
            "precision": str(self._prior.dtype),
            "noise": self._own_noise(),
            "entropy": os.urandom(32).hex(),
        }

    def _read(self, texts: list[str]) -> list[dict[str, Any]]:
        owners = self._require_here()
        everyone = []
        for rank, text in enumerate(texts):
            try:
                facts = json.loads(text)
                name = facts["owner"]
                if "failed" not in facts and not all(
                    0 < float(value) < math.inf for value in facts["noise"].values()
                ):
                    raise ValueError
            except (ValueError, KeyError, TypeError, AttributeError):
                raise RuntimeError(
                    f"owner {rank} sent settings that cannot be read: run the same version of this"
                    " library on all ranks."
                ) from None
            if name is not None:
                owners.names[rank] = f"owner {rank} ({name!r:.102})"
            everyone.append(facts)
        return everyone

    def _compare(self, everyone: list[dict[str, Any]]) -> None:
        owners = self._require_here()
        first = everyone[0]
        differences = []
        for topic in ("versions", "settings", "model", "precision", "noise"):
            for rank, theirs in enumerate(everyone):
                expected, found = (
                    facts[topic] if isinstance(facts[topic], dict) else {topic: facts[topic]}
                    for facts in (first, theirs)
                )
                for key in sorted({*expected, *found}):
                    missing = key not in expected or key not in found
                    if missing or (topic != "noise" and expected[key] != found[key]):
                        pair = (
                            f"{expected.get(key)!r:.200} for {owners.names[0]} and"
                            f" {found.get(key)!r:.200} for {owners.names[rank]}"
                        )
                        differences.append(f"{key} is {pair}")
        if differences:
            owners.live = False
            raise ValueError(
                f"the owners differ: {'; '.join(differences)}. They would draw from different"
                " posteriors: give all ranks the same model, settings and versions (noise"
                " multipliers and accountants may differ). Nothing was released."
            )

    def _compare_densities(self) -> None:
        """Prior and likelihood at two points, on rows that the first owner made up."""
        owners, density = self._require_here(), self._density
        assert density is not None
        with torch.no_grad(), without_value_checks():
            theta = owners.of_first(_Place.SET_UP, 0, density.made_up.theta).to(
                density.made_up.theta
            )
            rows = density.made_up.rows(_COMPARED_ROWS)
            for k, row in enumerate(rows):
                plain = torch.view_as_real(row) if row.is_complex() else row
                shared = owners.of_first(_Place.SET_UP, 0, plain).to(plain)
                rows[k] = torch.view_as_complex(shared) if row.is_complex() else shared
            values = []
            for point in (theta, theta.flip(0) * 0.7):
                values += [
                    density.made_up.terms(point, rows),
                    torch.tensor([density.prior.log_density(point)]).to(point),
                ]
            own = torch.cat(values)
        tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}.get(own.dtype, 3e-2)
        if different := owners.which(
            not _close(own, owners.of_first(_Place.SET_UP, 0, own), tolerance)
        ):
            owners.live = False
            raise ValueError(
                f"the model of {owners.listed(different)} has another density than that of"
                f" {owners.names[0]}, on made-up records: a constant, the prior or the likelihood"
                " differs. Give all ranks the same model. Nothing was released."
            )

    def _agree_on_start(self, given: bool) -> None:
        owners = self._require_here()
        assert self._prior is not None and self._theta is not None
        for _ in range(_DRAWS):
            first = owners.of_first(_Place.SET_UP, 0, self._theta).to(self._theta)
            if given and (different := owners.which(not torch.equal(first, self._theta))):
                owners.live = False
                raise ValueError(
                    f"{owners.listed(different)} got other initial_params than {owners.names[0]}: a"
                    " chain over all owners starts at one point. Give all the same ones, or none."
                    " Nothing was released."
                )
            self._theta = first
            if not owners.which(
                not math.isfinite(self._log_prior_at(first)) or not self._is_valid(first)
            ):
                return
            if given:
                break
            if owners.rank == 0:
                self._theta = self._prior.sample()
        owners.live = False
        raise ValueError(
            "the owners found no start at which the model can be evaluated: pass initial_params= to"
            " MCMC, made without data."
        )

    # -- one iteration -----------------------------------------------------------------------------

    def sample(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """One iteration of all owners together: charged by each of them first, then made.

        Raises:
            PrivacyBudgetExceeded: the iteration does not fit into the budget of one of the owners.
                All stop; nothing was released.
            RuntimeError: another owner failed, ended, or cannot be reached. What was charged stays
                charged.
        """
        if not self._require_here().live:
            raise RuntimeError(
                "the owners are not in a run together: call pyro.infer.MCMC(kernel, ...).run(own"
                " data) on all ranks."
            )
        with self._telling_the_others():
            return super().sample(params)

    def _start(self, theta: Tensor) -> None:
        self._public = _SharedRandomness(self._seed, self._iteration, 0)
        super()._start(theta)  # type: ignore[safe-super]

    def _iterate(self, theta: Tensor) -> tuple[Tensor, Outcome]:
        theta = self._begin_together(theta)
        self._public = _SharedRandomness(self._seed, self._iteration, 1)
        self._tested = False
        moved, outcome = super()._iterate(theta)  # type: ignore[safe-super]
        # the point is invalid here; others may have found it valid, and wait for this rank's ratio
        if not self._tested:
            self._test_together(0.0, 0.0, invalid=True)
        return moved, outcome

    def _begin_together(self, theta: Tensor) -> Tensor:
        """Whether all can pay; and the first rank's θ, which differs from this one's by
        round-off if their processors differ.
        """
        owners = self._require_here()
        if not self._can_pay():
            owners.leave(_Place.NO_BUDGET, self._iteration)
            raise PrivacyBudgetExceeded(
                f"the budget of this owner does not allow for iteration {self._iteration + 1}, so"
                " all owners stop before it. Nothing of it was charged or released. The draws so"
                " far are in kernel.get_samples()."
            )
        own = torch.cat(
            [
                theta.detach().cpu().double(),
                torch.tensor([float(self._accepted)], dtype=torch.float64),
            ]
        )
        first = owners.of_first(_Place.ITERATE, self._iteration, own)
        if first[-1] != self._accepted or not _close(theta, first[:-1], 1e-4):
            raise RuntimeError(
                f"the chain of this owner and that of {owners.names[0]} are at different points:"
                f" they computed different accept decisions. {_CHARGED}"
            )
        return first[:-1].to(theta)

    def _can_pay(self) -> bool:
        charges = self._charges()
        together = events.ComposedDpEvent(
            [events.SelfComposedDpEvent(event, count) for event, count in charges]
        )
        if self._accountant.remaining(together) >= 1:
            return True
        # Of several events together, remaining() leaves out what a registered schedule covers.
        return self._accountant.guarantee == "registered" and all(
            self._accountant.remaining(event) >= count for event, count in charges
        )

    def _metropolis(
        self, log_ratio: float, rest: float, bound: float, multiplier: float
    ) -> Outcome:
        std, total_std = (
            multiplier * bound,
            self._total_noise[next(iter(self._own_noise()))] * bound,
        )
        if not (can_hide(bound) and can_hide(std) and can_hide(total_std)):
            return Outcome(False, math.nan)
        self._tested = True
        log_uniform = float(
            torch.special.log_ndtr(
                torch.tensor(self._standard_normal(public=True), dtype=torch.float64)
            )
        )
        return self._test_together(
            log_ratio + std * self._standard_normal(), log_uniform - rest + total_std**2 / 2
        )

    def _test_together(self, noisy: float, threshold: float, invalid: bool = False) -> Outcome:
        """Accept where the noisy log ratio of all owners is above the first owner's
        ``threshold``.
        """
        owners = self._require_here()
        sent = torch.tensor(
            [noisy, threshold if owners.rank == 0 else 0.0, float(invalid)], dtype=torch.float64
        )
        noisy, first, invalids = owners.sum(_Place.RATIO, self._iteration, sent).tolist()
        if invalids:
            return Outcome(False, math.nan)
        if not _close(torch.tensor(threshold), torch.tensor(first), 1e-2):
            raise RuntimeError(
                f"the accept test of this owner and that of {owners.names[0]} differ, {threshold:g}"
                f" and {first:g}: their priors or their shared randomness do. {_CHARGED}"
            )
        return Outcome(noisy > first, noisy)

    # -- the end -----------------------------------------------------------------------------------

    def cleanup(self) -> None:
        """Called by Pyro at the end of a chain: tells the other owners, and lets go of the data."""
        if self._owners is not None:
            self._owners.leave(_Place.ENDED, self._iteration)
        super().cleanup()

    def _require_here(self) -> _Owners:
        if self._owners is None or not self._owners.is_here:
            raise RuntimeError(
                "this kernel was copied into another process than the one that is in the process"
                " group: MCMC's parallel chains cannot run over many owners. Leave out num_chains=,"
                " and run more than one chain by more than one run(). Nothing was released."
            )
        return self._owners

    @contextmanager
    def _telling_the_others(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            owners = self._require_here()
            owners.leave(
                _Place.NO_BUDGET if isinstance(error, PrivacyBudgetExceeded) else _Place.FAILED,
                self._iteration,
            )
            raise


class MultiOwnerPenalty(_OwnedKernel, DPPenalty):
    r"""Differentially private random-walk Metropolis-Hastings over the data of J owners, who keep
    them.

    .. math::
        \tilde R = \sum_{j=1}^J \Big[\sum_i \mathrm{clip}_{\pm c d}\big(
        \log p(x_{ji}|\theta') - \log p(x_{ji}|\theta)\big)
        + \sigma_j\xi_j\Big],
        \qquad \sigma_j = z_j c d, \quad d = \|\theta' - \theta\|

    Accepts θ' iff log u < R̃ + log prior ratio − (σ_1² + … + σ_J²)/2, with u and θ' from randomness
    that the owners share. Each bracket is computed, hidden by noise and charged by its owner; see
    :mod:`torch_dpbayes.mcmc.multi_owner` for who sees what. The chain is that of
    :class:`~torch_dpbayes.mcmc.DPPenalty` with the noise multiplier √(Σ z_j²) on the pooled data: σ
    ≈ 2.4 for all together moves farthest.

    Source: Yıldırım and Ermiş (2019), Algorithm 2, there with equal noise for all owners.

    Every owner makes this kernel in its own process, with the same settings, and runs
    ``MCMC(kernel, ...).run(own data)``; all get the same draws. Owners may hold different numbers
    of records, also none, and have different budgets, relations and noise.

    Args:
        model: as for ``DPPenalty``; the same for all owners, as are all settings but those marked
            *own*.
        proposal_scale: of the random walk, as for ``DPPenalty``.
        log_ratio_slope: c.
        noise_multiplier: *own* z_j, known to the others; positive.
        accountant: *own*, where every iteration is charged.
        data_plate: name of the data plate.
        target_accept_prob: acceptance rate that warm-up adapts the scale to. None: no adaptation.
        owner: *own* name, for messages that all owners see.
        process_group: the process group, one rank an owner. None: that of all processes. Its
            timeout is how long an owner waits for the others. A group with ``gloo`` exchanges on
            the CPU, one with ``nccl`` alone on the GPU, where torch ends a process whose exchange
            fails.

    Raises:
        ValueError: an argument is out of range; or, in ``MCMC.run``, the model is not fit for it,
            or differs between owners.
        RuntimeError: there is no process group; or, in ``MCMC.run``, an owner failed, ended or
            cannot be reached.
        PrivacyBudgetExceeded: in ``MCMC.run`` of all owners, before the first iteration that one of
            them cannot pay.

    **Privacy.** An iteration releases an owner's bracket to the other owners, whose sum a record of
    that owner moves as in ``DPPenalty``: ``GaussianDpEvent(z_j)``, charged to that owner alone, by
    its own noise and in its own relation, before anything is sent.
    """

    def __init__(
        self,
        model: Model,
        *,
        proposal_scale: float | Tensor,
        log_ratio_slope: float,
        noise_multiplier: float,
        accountant: PrivacyAccountant,
        data_plate: str = "data",
        target_accept_prob: float | None = 0.23,
        owner: str | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            model,
            proposal_scale=proposal_scale,
            log_ratio_slope=log_ratio_slope,
            noise_multiplier=noise_multiplier,
            accountant=accountant,
            data_plate=data_plate,
            target_accept_prob=target_accept_prob,
        )
        self._proposal_scale = _public(proposal_scale)
        self._join(owner, process_group)

    def _own_noise(self) -> dict[str, float]:
        return {"noise_multiplier": self._multiplier}

    def _settings(self) -> dict[str, Any]:
        return {
            "proposal_scale": self._proposal_scale,
            "log_ratio_slope": self._slope,
            "data_plate": self._plate,
        }


class MultiOwnerHMC(_OwnedKernel, DPHMC):
    r"""Differentially private Hamiltonian Monte Carlo over the data of J owners, who keep them.

    .. math::
        \tilde g(\theta) = -\sum_{j=1}^J \Big[\sum_i
        \mathrm{clip}_b\big(\nabla\log p(x_{ji}|\theta)\big)
        + z_{g,j} b\,\zeta_j\Big]
        - \nabla\log p(\theta)

    in the trajectories of :class:`~torch_dpbayes.mcmc.DPHMC`, whose ends are tested as in
    :class:`MultiOwnerPenalty`: it is ``DPHMC`` with the noise multipliers √(Σ z_{g,j}²) and √(Σ
    z_{l,j}²) on the pooled data. The owners share momenta and jitter.

    Source: Räisä, Koskela and Honkela (2021), Algorithm 1, on the sums of Yıldırım and Ermiş
    (2019), Algorithm 2.

    Args:
        model, step_size, num_steps, log_ratio_slope, max_grad_norm, data_plate, mass_matrix,
        jitter, reuse_gradients, target_accept_prob: as for
            ``DPHMC``, and the same for all owners.
        ratio_noise_multiplier, grad_noise_multiplier: *own* z_l and z_g, known to the others;
        positive.
        accountant, owner, process_group: as for :class:`MultiOwnerPenalty`.

    Raises:
        ValueError, RuntimeError, PrivacyBudgetExceeded: as :class:`MultiOwnerPenalty`.

    **Privacy.** An iteration releases an owner's L noisy gradient sums (the first one L + 1;
    without reuse every one) and its noisy ratio to the other owners: ``GaussianDpEvent(z_g)`` and
    ``GaussianDpEvent(z_l)``, charged to that owner by its own noise, before the trajectory starts.
    """

    def __init__(
        self,
        model: Model,
        *,
        step_size: float,
        num_steps: int,
        log_ratio_slope: float,
        max_grad_norm: float,
        ratio_noise_multiplier: float,
        grad_noise_multiplier: float,
        accountant: PrivacyAccountant,
        data_plate: str = "data",
        mass_matrix: Tensor | None = None,
        jitter: bool = True,
        reuse_gradients: bool = True,
        target_accept_prob: float | None = 0.65,
        owner: str | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            model,
            step_size=step_size,
            num_steps=num_steps,
            log_ratio_slope=log_ratio_slope,
            max_grad_norm=max_grad_norm,
            ratio_noise_multiplier=ratio_noise_multiplier,
            grad_noise_multiplier=grad_noise_multiplier,
            accountant=accountant,
            data_plate=data_plate,
            mass_matrix=mass_matrix,
            jitter=jitter,
            reuse_gradients=reuse_gradients,
            target_accept_prob=target_accept_prob,
        )
        self._mass_matrix = _public(mass_matrix)
        self._join(owner, process_group)

    def _own_noise(self) -> dict[str, float]:
        return {
            "ratio_noise_multiplier": self._ratio_multiplier,
            "grad_noise_multiplier": self._grad_multiplier,
        }

    def _settings(self) -> dict[str, Any]:
        return {
            "step_size": self._step_size,
            "num_steps": self._num_steps,
            "log_ratio_slope": self._slope,
            "max_grad_norm": self._max_norm,
            "data_plate": self._plate,
            "mass_matrix": self._mass_matrix,
            "jitter": self._jitter,
            "reuse_gradients": self._reuse,
        }

    def _noisy_gradient_sum(self, theta: Tensor) -> Tensor:
        own, invalid = (
            torch.zeros(len(theta), dtype=torch.float64),
            torch.ones(1, dtype=torch.float64),
        )
        try:
            own, invalid = (
                super()._noisy_gradient_sum(theta).cpu(),
                torch.zeros(1, dtype=torch.float64),
            )
        except InvalidPoint:  # for made-up records; the others have to hear of it
            pass
        total = self._require_here().sum(
            _Place.GRADIENT, self._iteration, torch.cat([own, invalid])
        )
        if total[-1]:
            raise InvalidPoint
        return total[:-1].to(theta.device)


def _public(value: float | Tensor | None) -> float | str | None:
    """A setting as it is compared."""
    if not isinstance(value, Tensor):
        return None if value is None else float(value)
    digest = hashlib.sha256(
        value.detach().cpu().double().contiguous().numpy().tobytes()
    ).hexdigest()
    return f"tensor {tuple(value.shape)} with digest {digest[:16]}"


def _close(own: Tensor, other: Tensor, tolerance: float) -> bool:
    own, other = own.detach().cpu().double(), other.detach().cpu().double()
    if torch.equal(own, other):
        return True
    scale = float(own.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(
        own, other, rtol=tolerance, atol=tolerance * max(scale, 1e-30), equal_nan=True
    )
