"""What all private kernels share: Pyro's contract, charges, public randomness, and the draws so
far.

One iteration of a kernel charges everything that it is going to release, draws the noise, and
accepts or rejects. Warm-up, rejected proposals and every chain are charged alike. Whatever happens
with the noisy numbers is post-processing.
"""

from __future__ import annotations

import _thread
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterable
from functools import cache
from multiprocessing import connection, util
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from torch import Tensor

from ..accounting import events
from ..accounting.accountant import PrivacyAccountant
from ..noise import GaussianNoise
from .proposals import Moves
from .record_density import Model, Prior, UnfitModel

_DRAWS = 100
_SECONDS_TO_CHARGE, _SECONDS_TO_WRITE, _SECONDS_TO_NOTICE = 30.0, 1.0, 0.2
_RUNNER = "pyro.infer.mcmc.api"
_RUNNING = ("_noise", "_public", "_theta", "_log_prior", "_prior")


class Outcome(NamedTuple):
    """One noisy Metropolis test."""

    accepted: bool
    log_ratio: float
    """Noisy log-likelihood ratio, as charged."""


class PrivateKernel(MCMCKernel):
    """Base of the private kernels. A subclass charges an iteration and says where to go.

    Args:
        model: the Pyro model.
        accountant: where every iteration is charged. Parallel chains need one with ``path=``, which
            processes share.
        target_accept_prob: what warm-up adapts the scale of the moves to, by the noisy accept
            decisions alone. None: no adaptation.

    **Privacy.** Draws, accept decisions and noisy log-likelihood ratios are what was charged for;
    they may be published. The kernel keeps the data from :meth:`setup` on, in private attributes
    that are never pickled, until :meth:`cleanup`. Randomness comes from the operating system:
    Pyro's and torch's seeds neither repeat a run nor, which matters more, reveal its noise.
    """

    def __init__(
        self, model: Model, accountant: PrivacyAccountant, target_accept_prob: float | None
    ) -> None:
        if not isinstance(accountant, PrivacyAccountant):
            raise TypeError(
                f"accountant must be a PrivacyAccountant, got {accountant!r}: every iteration is"
                " charged somewhere."
            )
        if target_accept_prob is not None and not 0 < target_accept_prob < 1:
            raise ValueError(
                f"target_accept_prob must lie in (0, 1) or be None, got {target_accept_prob!r}."
            )
        super().__init__()
        self.model = model
        self.transforms: dict[str, Any] | None = None
        self._accountant = accountant
        self._target = target_accept_prob
        self._starts: dict[int | None, dict[str, Tensor] | None] = {}
        self._saved: list[str] | None = None
        self._chains: list[list[dict[str, Tensor]]] = []
        self._epsilon = (-math.inf, "")
        self._spool = _Spool() if accountant.path is not None else None
        self._log_scale = 0.0
        self._forget()

    def _forget(self) -> None:
        self._prior: Prior | None = None
        self._noise: GaussianNoise | None = None
        self._public: GaussianNoise | None = None
        self._theta: Tensor | None = None
        self._log_prior, self._started = 0.0, False
        self._log_ratios: list[float] = []
        self._diverged: list[int] = []
        self._accepted = self._iteration = self._counted = self._warmup_steps = 0

    # -- what an algorithm's file provides ---------------------------------------------------------

    @abstractmethod
    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prior:
        """Check the model and take hold of the data. Nothing is released, nothing charged."""

    @abstractmethod
    def _start(self, theta: Tensor) -> None:
        """A chain begins at ``theta``, or was put there."""

    @abstractmethod
    def _iterate(self, theta: Tensor) -> tuple[Tensor, Outcome]:
        """Charge one iteration, then make it: the next θ."""

    def _is_valid(self, theta: Tensor) -> bool:
        """Whether the likelihood can be evaluated at ``theta``, whatever the data are."""
        return True

    # -- Pyro's contract ---------------------------------------------------------------------------

    @property
    def accountant(self) -> PrivacyAccountant:
        """Where every iteration is charged."""
        return self._accountant

    @property
    def initial_params(self) -> dict[str, Tensor] | None:
        """Where the chain starts, in unconstrained space: what the user gave, or else a draw
        from the prior. Never chosen by the data.
        """
        if self._initial is not None or self._prior is None or self._theta is None:
            return self._initial
        return self._prior.unflatten(self._theta)

    @initial_params.setter
    def initial_params(self, params: dict[str, Tensor] | None) -> None:
        # Of parallel chains Pyro sets all starts on this one object, before it copies it to the
        # workers; whose it is stands where it does so.
        caller = sys._getframe(1)
        chain = (
            caller.f_locals["chain_id"]
            if caller.f_globals.get("__name__") == _RUNNER and "chain_id" in caller.f_locals
            else None
        )
        self._starts = {**(self._starts if chain else {}), chain: params}

    @property
    def _initial(self) -> dict[str, Tensor] | None:
        return self._starts.get(_chain(), next(iter(self._starts.values()), None))

    @property
    def save_params(self) -> list[str]:
        """Names of the sites whose draws are kept, sorted: Pyro would mislabel them in
        another order. Unless set, there is no such attribute.
        """
        if self._saved is None:
            raise AttributeError("save_params is not set: the draws of all sites are kept.")
        return self._saved

    @save_params.setter
    def save_params(self, names: Iterable[str]) -> None:
        if isinstance(names, str):
            raise TypeError(f"save_params is a list of names, [{names!r}].")
        self._saved = sorted(set(names))

    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        """Called by Pyro at the start of every chain, and once more after parallel ones. Releases
        and charges nothing.

        Raises:
            ValueError: the model or the data are not fit for record-wise clipping, see
                :class:`RecordDensity`, or the start is not finite.
        """
        self._forget()
        self._warmup_steps = warmup_steps
        self._log_scale = 0.0
        if self._spool is not None and _chain() is not None:  # before anything that takes long
            _give_back_when_terminated(self._accountant)
        with torch.no_grad():
            prior = self._prepare(args, kwargs)
            if unknown := sorted(set(self._saved or ()) - set(prior.transforms)):
                raise ValueError(
                    f"save_params names {unknown}, the model's latents are"
                    f" {sorted(prior.transforms)}."
                )
            self._prior, self.transforms = prior, prior.transforms
            self._noise, self._public = GaussianNoise(), GaussianNoise()
            if self._initial is not None:
                self._theta = prior.flatten(self._initial)
                self._require_start(self._theta)
                return
            for _ in range(_DRAWS):
                self._theta = prior.sample()
                if self._is_valid(self._theta):
                    return
        raise ValueError(
            f"the model cannot be evaluated at any of {_DRAWS} draws from its prior: pass"
            " initial_params= to MCMC, made without data."
        )

    def sample(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """One iteration: charged first, then made.

        Raises:
            PrivacyBudgetExceeded: the iteration does not fit into the budget; nothing was released.
                The draws so far: :meth:`get_samples`.
        """
        if self._prior is None:
            raise RuntimeError(
                "sample() before setup(): run the kernel with pyro.infer.MCMC(kernel,"
                " ...).run(data)."
            )
        with torch.no_grad():
            theta = self._prior.flatten(params)
            if not self._started or self._theta is None or not torch.equal(theta, self._theta):
                self._log_prior = self._require_start(theta)
                self._start(theta)
                self._theta, self._started = theta, True
            self._theta, outcome = self._iterate(theta)
            self._record(outcome)
            return self._prior.unflatten(self._theta.clone())

    def _require_start(self, theta: Tensor) -> float:
        """log p(θ) where a chain may start. A chain at a point without density would stay
        there, at full price.
        """
        log_prior = self._log_prior_at(theta)
        if not math.isfinite(log_prior) or not self._is_valid(theta):
            raise ValueError(
                "the chain would start where the values are not finite, the prior has no density or"
                " the model cannot be evaluated: pass initial_params= in unconstrained space, where"
                " zeros are a safe choice."
            )
        return log_prior

    def _record(self, outcome: Outcome) -> None:
        assert self._prior is not None and self._theta is not None
        self._log_ratios.append(outcome.log_ratio)
        self._iteration += 1
        if self._iteration <= self._warmup_steps:
            if self._target is not None:
                self._log_scale += (outcome.accepted - self._target) * self._iteration**-0.6
            if self._iteration == self._warmup_steps:
                self._accepted = self._counted = 0
                return
        self._accepted += outcome.accepted
        self._counted += 1
        if self._iteration > self._warmup_steps:
            if math.isnan(outcome.log_ratio):
                self._diverged.append(self._iteration - self._warmup_steps - 1)
            if self._iteration == self._warmup_steps + 1:
                self._chains.append([])
            values = self._prior.constrain(self._theta)
            draw = {name: values[name].detach().cpu().clone() for name in self._saved or values}
            if self._spool is not None and multiprocessing.parent_process() is not None:
                self._spool.write(draw)
            else:
                self._chains[-1].append(draw)

    def cleanup(self) -> None:
        """Called by Pyro at the end of a chain: lets go of the data and of the start, and
        returns to the ledger what was reserved and not used.
        """
        self._forget()
        self._starts = {}
        if self._spool is not None:
            self._accountant.close()

    def logging(self) -> OrderedDict[str, str]:
        """For the progress bar: scale, rate of noisy acceptances, epsilon so far. Nothing exact."""
        return OrderedDict(
            [
                ("step size", f"{self._scale:.2e}"),
                ("acc. rate", f"{self._accepted / max(self._counted, 1):.3f}"),
                ("epsilon", self._spent()),
            ]
        )

    def diagnostics(self) -> dict[str, Any]:
        """Rate of noisy acceptances after warm-up, the numbers of the draws before which a move
        left where the model can be evaluated, and the noisy log-likelihood ratios of all
        iterations, as charged.
        """
        return {
            "acceptance rate": self._accepted / max(self._counted, 1),
            "divergences": list(self._diverged),
            "noisy log ratios": list(self._log_ratios),
        }

    def get_samples(self, group_by_chain: bool = False) -> Any:
        """The draws after warm-up of all chains that this kernel ran, also of those that the budget
        or Ctrl-C ended.

        ``MCMC.run`` forgets its draws when it is left by an exception; they are paid for, and can
        be had here, parallel chains included. It does not call :meth:`cleanup` then: call it to let
        go of the data.

        Args:
            group_by_chain: a list of dicts, one a chain, instead of one dict with all draws. Chains
                may differ in length.

        Returns:
            values by site, in the supports of the model's distributions, (number of draws, ...).
        """
        grouped = [
            {name: torch.stack([draw[name] for draw in chain]) for name in chain[0]}
            for chain in self._draws()
        ]
        if group_by_chain or not grouped:
            return grouped if group_by_chain else {}
        return {name: torch.cat([chain[name] for chain in grouped]) for name in grouped[0]}

    def __getstate__(self) -> dict[str, Any]:
        # A kernel travels to spawned workers before setup; whatever stems from the data without a
        # charge stays here.
        state = dict(self.__dict__)
        for name in (*_RUNNING, *self._private_state()):
            state[name] = None
        if get_spawning_popen() is not None:
            return {**state, "_chains": []}
        return {**state, "_chains": self._draws(), "_spool": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._spool is None and self._accountant.path is not None:
            self._spool = _Spool()  # of its own: that of the original ends with it

    def _draws(self) -> list[list[dict[str, Tensor]]]:
        return [chain for chain in self._chains if chain] + (
            self._spool.read() if self._spool is not None else []
        )

    def _private_state(self) -> tuple[str, ...]:
        return ()

    def _spent(self) -> str:
        # Composing takes milliseconds and a chain logs every iteration: once a second is enough.
        if time.monotonic() - self._epsilon[0] > 1.0:
            delta = 1e-5 if self._accountant.delta is None else self._accountant.delta
            self._epsilon = (time.monotonic(), f"{self._accountant.get_epsilon(delta):.3g}")
        return self._epsilon[1]

    # -- parts of an iteration ---------------------------------------------------------------------

    @property
    @abstractmethod
    def _scale(self) -> float:
        """The scale of the moves in force."""

    def _charge(self, *charges: tuple[events.DpEvent, int]) -> None:
        parts = [events.SelfComposedDpEvent(event, count) for event, count in charges if count]
        self._accountant.compose(events.ComposedDpEvent(parts), label=type(self).__name__)

    def _gaussian(self, size: int, public: bool = False) -> Tensor:
        """Standard normal numbers. Those that hide a sum over records are float64, as the sum
        is; public ones have θ's dtype.
        """
        source = self._public if public else self._noise
        assert source is not None and self._prior is not None
        return source.standard_normal(
            size, dtype=self._prior.dtype if public else torch.float64, device=self._prior.device
        )

    def _standard_normal(self, public: bool = False) -> float:
        source = self._public if public else self._noise
        assert source is not None
        return float(source.standard_normal(1, dtype=torch.float64, device=torch.device("cpu")))

    def _propose(self, moves: Moves, theta: Tensor) -> tuple[Tensor, float]:
        """θ' and log q(θ | θ') − log q(θ' | θ)."""
        assert self._prior is not None
        if moves.proposal is None:
            return (
                theta
                + math.exp(self._log_scale) * moves.step(self._gaussian(len(theta), public=True)),
                0.0,
            )
        params, ratio = moves.proposal.propose(self._prior.unflatten(theta.clone()))
        return self._prior.flatten(params), float(ratio)

    def _metropolis(
        self, log_ratio: float, rest: float, bound: float, multiplier: float
    ) -> Outcome:
        """log u < R̃ + rest − std²/2 with R̃ = ``log_ratio`` + noise of std =
        ``multiplier``·``bound``; what is not a number rejects. Where ``bound`` is 0, no record has
        a part in ``log_ratio``.
        """
        std = multiplier * bound
        if multiplier and bound and not (can_hide(bound) and can_hide(std)):
            return Outcome(False, math.nan)
        noisy = log_ratio + std * self._standard_normal() if std else log_ratio
        log_uniform = float(
            torch.special.log_ndtr(
                torch.tensor(self._standard_normal(public=True), dtype=torch.float64)
            )
        )
        return Outcome(log_uniform < noisy + rest - std**2 / 2, noisy)

    def _log_prior_at(self, theta: Tensor) -> float:
        """log p(θ), or −inf where the model cannot be evaluated."""
        assert self._prior is not None
        if not theta.isfinite().all():
            return -math.inf
        try:
            value = self._prior.log_density(theta)
        except UnfitModel:
            raise
        except Exception:  # depends on θ alone
            return -math.inf
        return value if not math.isnan(value) else -math.inf


def can_hide(scale: float) -> bool:
    """False for a clip bound, or a noise standard deviation, where squares and sums over records
    could overflow or be rounded to nothing, and one record would show. All is clipped, summed and
    noised in float64, whatever the model's dtype. ``scale`` is public.
    """
    return 1e-30 < scale < 1e150


def noise_event(noise_multiplier: float) -> events.DpEvent:
    """A full-batch Gaussian sum, or a release without noise."""
    return (
        events.GaussianDpEvent(float(noise_multiplier))
        if noise_multiplier
        else events.NonPrivateDpEvent()
    )


def check_noise(name: str, value: float) -> float:
    """``value`` as 0 or a valid noise multiplier."""
    return float(value) if value == 0 else events.gaussian_noise_multiplier(value, name)


def check_positive(name: str, value: Any, what: str) -> float:
    """``value`` as a positive finite float."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive finite number, {what}; got {value!r}.")
    return float(value)


def check_clip_bound(name: str, value: Any, what: str) -> float:
    """``value`` as a clip bound that noise can hide."""
    if not can_hide(bound := check_positive(name, value, what)):
        raise ValueError(
            f"{name} = {value!r} is too extreme for squares and sums in 64-bit floats: they would"
            " overflow, or be rounded to nothing, depending on one record, which no noise hides."
            " Take a value between 1e-30 and 1e150; measure the parameters or the data in other"
            " units if need be."
        )
    return bound


class _Spool:
    """Draws of worker processes, in files that outlive them. They are releases that were
    charged, not data.
    """

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="torch_dpbayes_chains_")
        _keep_interrupts()
        self._file: Any = None
        # After all workers have ended. In workers of the standard library nothing else is called at
        # the end; not in forks.
        util.Finalize(
            self,
            shutil.rmtree,
            args=(self.folder,),
            kwargs={"ignore_errors": True},
            exitpriority=-100,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "_file": None}

    def write(self, draw: dict[str, Tensor]) -> None:
        if self._file is None or self._file[0] != os.getpid():
            chain = f"-{multiprocessing.current_process().name:0>20}"  # Pyro numbers its workers
            run = sum(path.name.endswith(chain) for path in Path(self.folder).iterdir())
            self._file = (os.getpid(), open(Path(self.folder, f"{run:010d}{chain}"), "xb"))
        pickle.dump({name: value.numpy() for name, value in draw.items()}, self._file[1])
        self._file[1].flush()

    def read(self) -> list[list[dict[str, Tensor]]]:
        """Run by run, chain by chain."""
        chains = []
        for path in sorted(Path(self.folder).iterdir()):
            chain = []
            with path.open("rb") as file:
                while True:
                    try:
                        chain.append(
                            {
                                name: torch.as_tensor(value)
                                for name, value in pickle.load(file).items()
                            }
                        )
                    # the last draw of a worker that was stopped may be cut short
                    except (EOFError, pickle.UnpicklingError):
                        break
            chains.append(chain)
        return [chain for chain in chains if chain]


def _chain() -> int | None:
    """The chain's number in a process that Pyro started to run one of several chains, and
    nothing else.
    """
    worker = getattr(getattr(multiprocessing.current_process(), "_target", None), "__self__", None)
    return worker.chain_id if type(worker).__module__ == _RUNNER else None  # type: ignore[union-attr]


def _give_back_when_terminated(accountant: PrivacyAccountant) -> None:
    """For the rest of this process, which only runs a chain: on SIGTERM, by which Pyro ends it when
    another chain fails or is interrupted, and when its parent has ended, it gives back what it has
    reserved, and ends. Ctrl-C, which all processes get, is left to the parent.

    A thread does it: the chain may be waiting for Pyro, or for a lock that nobody is going to
    release.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent_pid, sentinel = parent.pid, parent.sentinel
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # as Python asks for
    mask: set[Any] = set()

    def note(number: int, _: object) -> None:
        os.write(writer, bytes([number]))

    starter = os.getppid()

    def has_parent() -> bool:
        # Something else that the parent forked may keep its sentinel open, and it may have ended
        # before this began.
        return os.getppid() == starter and _is_there(parent_pid)

    def leave() -> None:
        is_told = False
        while not is_told and has_parent():
            ready = connection.wait([reader, sentinel], timeout=_SECONDS_TO_NOTICE)
            if sentinel in ready:
                break
            is_told = reader in ready and signal.SIGTERM in os.read(reader, 4096)
        try:
            accountant.close_for_good(_SECONDS_TO_CHARGE)  # no iteration begins any more
        finally:  # what was not given back stays charged
            # a thread that writes into a queue holds a lock of all processes
            end = time.monotonic() + _SECONDS_TO_WRITE
            while has_parent() and time.monotonic() < end:
                time.sleep(0.05)
            os._exit(128 + signal.SIGTERM)

    # What the chain forks is no chain: signals to it are held back until it has forgotten all this.

    def hold_back() -> None:
        nonlocal mask
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, before)

    def let_through() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def forget() -> None:
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) is note:
            for number, handler in before.items():
                signal.signal(number, handler)
        let_through()

    threading.Thread(target=leave, daemon=True).start()
    # a handler has to wait where the chain waits, this has not
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    before = {
        number: signal.signal(number, note) or signal.SIG_DFL
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    os.register_at_fork(before=hold_back, after_in_parent=let_through, after_in_child=forget)


def _is_there(pid: int | None) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid or 0, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        pass
    return True


@cache
def _keep_interrupts() -> None:
    """From now on Ctrl-C is heard though it comes while a process forks. Python calls functions
    then whose exceptions it drops, KeyboardInterrupt among them: the program would go on, and so
    would its chains.
    """
    heard: list[int] = []
    held: list[Any] = []

    def hold() -> None:
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            held.append(signal.signal(signal.SIGINT, lambda number, _: heard.append(number)))

    def release() -> None:
        if held:
            signal.signal(signal.SIGINT, held.pop())

    def release_in_parent() -> None:
        release()
        if heard:
            heard.clear()
            # not a Thread, for whose start one waits here
            _thread.start_new_thread(interrupt_soon, ())

    def interrupt_soon() -> None:
        time.sleep(0.05)  # until the fork is over
        _thread.interrupt_main()

    def release_in_child() -> None:
        release()
        heard.clear()  # the parent's

    os.register_at_fork(
        before=hold, after_in_parent=release_in_parent, after_in_child=release_in_child
    )


__all__ = [
    "Outcome",
    "PrivateKernel",
    "can_hide",
    "check_clip_bound",
    "check_noise",
    "check_positive",
    "noise_event",
]
