"""One posterior sample: solve for the tempering, charge, draw, release one value."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from .. import words
from ..accounting.accountant import PrivacyAccountant, PrivacyBudgetExceeded
from ..accounting.events import ComposedDpEvent, DpEvent, check_delta, check_epsilon, positive_count
from ..errors import ArgumentError, ArgumentTypeError
from ..noise import GaussianNoise
from .certificates import Certificate, FiniteRunLangevin, Setting, StepTooLarge
from .glm import GLM
from .models import Loss, Model
from .sampling_error import TooFar
from .softmax import Softmax

DEFAULT_CERTIFICATE = FiniteRunLangevin(steps=10_000)
_LEAST_TEMPERING = 1e-9
_PRECISION = 1e-9  # relative, of the tempering
_charging = threading.Lock()
_DELTA_IN_WORDS = 1e-5  # at which a guarantee is worded where nobody named a delta


class OnePosteriorSample:
    r"""Releases one draw from a posterior with a tempered likelihood, and says why that is private.

    .. math:: \theta \sim p_\rho(\theta \mid x) \propto p(\theta) \prod_i p(x_i \mid \theta)^\rho

    A draw from a posterior is random enough to be private by itself, if no record can change the
    density much: that is what the certificate bounds. With ``epsilon`` the largest ρ ≤ 1 is found
    at which everything on the accountant, this draw included, meets (``epsilon``, ``delta``);
    without, ρ = 1.

    Sources: Wang, Fienberg, Smola (2015), "Privacy for free", Algorithm 1 and Proposition 9; the
    certificates name theirs.

    Args:
        model: a :class:`~torch_dpbayes.ops.GLM`, a :class:`~torch_dpbayes.ops.Softmax`, or a Pyro
            model with one data plate named "data" that takes its data as arguments
            (:class:`~torch_dpbayes.mcmc.RecordDensity` says what it may hold). For torch modules
            see :meth:`for_module`.
        certificate: what bounds a record's influence, and how the draw is made. The default, 10,000
            steps of Langevin dynamics, is for a GLM.
        epsilon: the target ε, of everything on the accountant after one draw. None: no tempering;
            the certificate decides what it costs.
        delta: of the target. None: the accountant's.
        accountant: where the draw is charged. None: one of its own, with the target as its budget,
            for neighbours that replace one record.
        num_data: the number of records, a public constant; an upper bound N_max on that of both
            neighbouring data sets if the accountant's relation is add-or-remove-one. None: taken
            from the data under replace-one, where it is public.
        reserve: what will be charged to the accountant after the draw, as a chain that begins
            there; the target leaves room for it.

    Raises:
        ValueError, TypeError: an argument is out of range, or the certificate says nothing about
            this model.

    **Privacy.** :meth:`sample` charges the certificate's event to the accountant, then releases one
    draw; n draws are n releases and cost that much. Nothing else about the chain leaves: no path,
    no acceptance rate, no diagnostic, no exception or log line that a record's value can trigger.
    """

    def __init__(
        self,
        model: GLM | Softmax | Callable[..., Any],
        certificate: Certificate = DEFAULT_CERTIFICATE,
        epsilon: float | None = None,
        delta: float | None = None,
        accountant: PrivacyAccountant | None = None,
        *,
        num_data: int | None = None,
        reserve: DpEvent | None = None,
    ) -> None:
        if not isinstance(certificate, Certificate):
            raise ArgumentTypeError(
                "certificate must be one of torch_dpbayes.ops' certificates, as"
                f" FiniteRunLangevin(steps=1000), got {certificate!r}."
            )
        count_is_public = accountant is None or accountant.neighboring == "replace_one"
        posterior = _as_model(model, count_is_public)
        certificate.check(posterior)
        if delta is None and accountant is not None:
            delta = accountant.delta
        if epsilon is not None:
            epsilon = check_epsilon(epsilon)
            if delta is None:
                raise ArgumentError(
                    "a target needs both numbers: OnePosteriorSample(..., epsilon=1.0, delta=1e-5)"
                )
        elif reserve is not None:
            raise ArgumentError(
                "reserve= leaves room below a target: state epsilon= and delta=, or leave it out."
            )
        if accountant is None:
            accountant = PrivacyAccountant(epsilon, delta, neighboring="replace_one")
        self._model = posterior
        self._reserve = reserve
        self._certificate = certificate
        self._epsilon = epsilon
        self._delta = None if delta is None else check_delta(delta)
        self._accountant = accountant
        self._num_data = None if num_data is None else positive_count(num_data, "num_data")
        if (
            accountant.neighboring == "add_or_remove_one"
            and num_data is None
            and certificate.needs_num_data(posterior)
        ):
            raise ArgumentError(
                "the guarantee depends on the number of records, which is private here: state"
                " num_data=, an upper bound for every data set, or use"
                " PrivacyAccountant(neighboring='replace_one').",
                code="num-data",
            )
        self._solved: dict[int | None, float] = {}
        self._last_num_data: int | None = None

    @classmethod
    def for_module(
        cls,
        module: torch.nn.Module,
        certificate: Certificate,
        epsilon: float | None = None,
        delta: float | None = None,
        accountant: PrivacyAccountant | None = None,
        *,
        loss: Loss,
        prior_std: float,
        num_data: int | None = None,
        reserve: DpEvent | None = None,
    ) -> OnePosteriorSample:
        """One posterior sample of the trainable parameters of a torch module: ``sample(inputs,
        targets)`` returns them by name.

        A copy of the module is used, in eval mode; ``module.load_state_dict(draw, strict=False)``
        puts a draw into the module.

        Args:
            module: ``module(inputs)`` has the records along dimension 0, and no record looks at
                another. Frozen parameters and buffers count as public: they must not come from the
                records.
            certificate: :class:`Bounded` needs nothing but the range; others need asserted
                constants, which no network with more than one layer has.
            loss: −log p(target | input) of each record, up to a constant: ``loss(module(inputs),
                targets)`` returns ``[n]``.
            prior_std: standard deviation of the N(0, prior_std²) prior of every trainable
                parameter.
            epsilon, delta, accountant, num_data, reserve: as for :class:`OnePosteriorSample`.
        """
        from .pyro_model import model_of_module

        model = model_of_module(module, loss, prior_std)
        return cls(
            model, certificate, epsilon, delta, accountant, num_data=num_data, reserve=reserve
        )

    @property
    def _numbers(self) -> dict[str, Any]:
        numbers = {"model": self._model, "certificate": self._certificate}
        target = {} if self._epsilon is None else {"epsilon": self._epsilon, "delta": self._delta}
        return {**numbers, **target}

    def __repr__(self) -> str:
        return words.one_line(self, self._numbers, self._accountant)

    def _repr_html_(self) -> str:
        return words.html(self, self._numbers, self._accountant)

    # --- known without the data -------------------------------------------------------------------

    @property
    def accountant(self) -> PrivacyAccountant:
        """Where draws are charged."""
        return self._accountant

    @property
    def tempering(self) -> float:
        """ρ, the factor of the log likelihood; data-free."""
        return self._setting().tempering

    @property
    def variance_inflation(self) -> float:
        """1 + 1/ρ: the asymptotic variance of the draw as an estimate, in units of that of the
        maximum likelihood estimate.

        A Wald interval around a draw from n records is draw ± quantile · √((1 + 1/ρ) I⁻¹/n), with
        the Fisher information I at the draw (Wang, Fienberg, Smola 2015, Proposition 9). It counts
        no bias: of the prior, of clipping, and of a chain that was stopped early. Nor does it count
        the step size of a Langevin chain, which multiplies 1/ρ by up to 1/(1 − hM/2) along the
        directions of the largest curvature: by 2 for the default step of
        :class:`~torch_dpbayes.ops.FiniteRunLangevin`. For intervals take h ≤ 0.1/M.
        """
        return 1 + 1 / self.tempering

    @property
    def event(self) -> DpEvent:
        """What one draw is charged for."""
        return self._certificate.event(self._model, self._setting())

    def guarantee(self) -> str:
        """What one draw costs, what was proved and what was assumed, in words. Data-free; for
        a GLM it needs ``num_data``, or a draw before.
        """
        setting = self._setting()
        event = self._certificate.event(self._model, setting)
        alone = PrivacyAccountant(
            method=self._accountant.method, neighboring=self._accountant.neighboring
        ).compose(event)
        delta = self._delta if self._delta is not None else _DELTA_IN_WORDS
        statement = self._certificate.statement(self._model, setting)
        relation = {
            "replace_one": "one record is replaced",
            "add_or_remove_one": "one record is added or removed",
        }[setting.neighboring]
        lines = [
            (
                f"One posterior sample, certificate {type(self._certificate).__name__}, log"
                f" likelihood tempered by rho = {setting.tempering:.6g}"
            ),
            (
                f"  one draw    {event}: epsilon = {alone.get_epsilon(delta):.5g} at delta ="
                f" {delta:g} when {relation}; n draws cost n times this event"
            ),
            *(f"  proved      {line}" for line in statement.proved),
            *(f"  ASSUMED     {line}" for line in statement.assumed),
        ]
        if not statement.assumed:
            lines.append(
                "  assumed     nothing about data, model or convergence; floating point is taken"
                " for real numbers"
            )
        return "\n".join(lines)

    # --- the release ------------------------------------------------------------------------------

    def sample(self, *data: Any) -> dict[str, Tensor]:
        """Charges one release, then draws.

        Args:
            *data: for a GLM the features ``[n, d]`` and the targets ``[n]``; the device of the
                features decides where the chain runs. For a Pyro model its arguments, for a module
                inputs and targets.

        Returns:
            The draw by name, in the user's constrained space: ``{"weights": [d]}`` for a GLM,
            values of the latents for a Pyro model.

        Raises:
            PrivacyBudgetExceeded: the draw would pass the target or the accountant's budget.
                Nothing is charged or released; only where another thread or process charged at the
                same moment, the charge stays and nothing is released.
            ValueError, TypeError: shapes that do not fit. Nothing is charged.

        **Privacy.** Released is the returned draw; its event is :attr:`event`.
        """
        return self.release_together(
            data,
            self._epsilon,
            self._reserve,
            f"one posterior sample ({type(self._certificate).__name__})",
        )

    def release_together(
        self,
        data: tuple[Any, ...],
        epsilon: float | None,
        reserve: DpEvent | None,
        label: str,
        together: DpEvent | None = None,
    ) -> dict[str, Tensor]:
        """A draw that is charged with what is released ``together`` with it: both or neither,
        within ``epsilon`` and with room for ``reserve``.
        """
        with _plain_arithmetic():
            data = self._model.prepare(data)
            num_data = self._check_num_data(self._model.num_records(data))
            setting = self._setting(num_data)
            event = self._certificate.event(self._model, setting)
            self._charge(
                event if together is None else ComposedDpEvent([event, together]),
                epsilon,
                reserve,
                label,
            )
            self._last_num_data = num_data
            theta = self._certificate.draw(self._model, data, setting, GaussianNoise())
            return self._model.release(theta)

    def _charge(
        self, event: DpEvent, epsilon: float | None, reserve: DpEvent | None, label: str
    ) -> None:
        """Charges; the target is posterior again afterwards, for other threads and processes
        charge the same accountant in between.
        """

        def passes_target(*more: DpEvent | None) -> bool:
            return epsilon is not None and self._epsilon_with(*more) > epsilon * (1 + 1e-9)

        with _charging:  # two draws at a time would each refuse the other
            if passes_target(event, reserve):
                raise PrivacyBudgetExceeded(
                    f"one more draw would pass the target epsilon = {epsilon:g} at delta ="
                    f" {self._delta:g}, as n draws cost n releases: make a new OnePosteriorSample"
                    " with a larger epsilon."
                )
            self._accountant.compose(event, label=label)
            if passes_target(reserve):
                raise PrivacyBudgetExceeded(
                    "other releases were charged meanwhile and pass the target epsilon ="
                    f" {epsilon:g} at delta = {self._delta:g}. Nothing was drawn, but the charge"
                    " stays: give simultaneous draws an accountant each."
                )

    # --- the tempering ----------------------------------------------------------------------------

    def _check_num_data(self, found: int) -> int | None:
        if self._accountant.neighboring == "replace_one":
            if self._num_data is not None and found != self._num_data:
                raise ArgumentError(
                    f"num_data = {self._num_data} was stated, but there are {found} records",
                    code="num-data",
                )
            return found
        if self._num_data is not None and found > self._num_data:
            raise ArgumentError(
                f"there are more records than num_data = {self._num_data}, the upper bound that was"
                " stated: choose one for every data set that could occur, without looking at the"
                " data.",
                code="num-data",
            )
        return self._num_data

    def _setting(self, num_data: int | None = None) -> Setting:
        if num_data is None:
            num_data = self._num_data if self._num_data is not None else self._last_num_data
        if not self._certificate.needs_num_data(self._model):
            num_data = None
        elif num_data is None:
            raise ArgumentError(
                "the guarantee depends on the number of records: state OnePosteriorSample(...,"
                " num_data=N), or draw first.",
                code="num-data",
            )
        if num_data not in self._solved:
            self._solved[num_data] = self._largest_tempering(num_data)
        return Setting(self._solved[num_data], num_data, self._accountant.neighboring)

    def _epsilon_with(self, *more: DpEvent | None) -> float:
        """ε of what the accountant holds, and of ``more``."""
        assert self._delta is not None
        if self._accountant.is_later_job or self._accountant.guarantee != "fixed":
            raise ArgumentError(
                "adaptive charges, or those of a later job, are guaranteed by the"
                " accountant's budget as a whole: leave out epsilon= and choose a certificate that"
                " fits the budget.",
                code="budget-whole",
            )
        joint = PrivacyAccountant(
            method=self._accountant.method, neighboring=self._accountant.neighboring
        )
        for charge in self._accountant.history:
            joint.compose(charge.event, charge.count)
        for event in more:
            if event is not None:
                joint.compose(event)
        return joint.get_epsilon(self._delta)

    def _largest_tempering(self, num_data: int | None) -> float:
        """The largest tempering that meets the target."""

        def cost(tempering: float) -> float:
            return self._epsilon_with(
                self._certificate.event(
                    self._model, Setting(tempering, num_data, self._accountant.neighboring)
                ),
                self._reserve,
            )

        if self._epsilon is None:
            return 1.0
        epsilon = self._epsilon

        def meets(tempering: float) -> bool:
            try:
                return cost(tempering) <= epsilon
            # M grows with the tempering; whether a step size that was given suits the result is
            # checked there
            except StepTooLarge:
                return False
            except TooFar:  # an exact draw that costs less leaves more room for the distance
                return False

        if meets(1.0):
            return 1.0
        low, high = _LEAST_TEMPERING, 1.0
        if not meets(low):
            if cost(low) > epsilon:
                raise ArgumentError(
                    f"epsilon = {epsilon:g} at delta = {self._delta:g} cannot be met after what is"
                    " held or reserved for later: use a larger epsilon, an empty accountant, or a"
                    " certificate with a smaller delta.",
                    code="budget-spent",
                )
        while high > low * (1 + _PRECISION):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if meets(middle) else (low, middle)
        with suppress(TooFar):
            # raises if a step is what stopped it
            self._certificate.event(
                self._model, Setting(high, num_data, self._accountant.neighboring)
            )
        return low


@contextmanager
def _plain_arithmetic() -> Iterator[None]:
    """Whatever the caller's context: sums over records are not rounded to half precision, and
    samplers may differentiate.
    """
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        yield


def _as_model(model: Any, count_is_public: bool) -> Model:
    if isinstance(model, GLM | Softmax):
        return model
    if not callable(model) or isinstance(model, type):
        raise ArgumentTypeError(
            f"model must be a dpb.ops.GLM, a dpb.ops.Softmax or a Pyro model, got {model!r}"
        )
    from pyro.nn import PyroModule  # only here: Pyro takes a while to load

    from .pyro_model import PyroModel

    if isinstance(model, torch.nn.Module) and not isinstance(model, PyroModule):
        raise ArgumentTypeError(
            "for a torch module use OnePosteriorSample.for_module(net, certificate, loss=...,"
            " prior_std=...)"
        )
    return PyroModel(model, count_is_public=count_is_public)
