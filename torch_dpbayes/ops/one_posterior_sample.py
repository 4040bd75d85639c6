"""One posterior sample: compute the tempering, charge, draw, release one value."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from .. import words
from ..accounting import bounds, renyi
from ..accounting.accountant import PrivacyAccountant, PrivacyBudgetExceeded
from ..accounting.calibration import counts_of, crossing
from ..accounting.dominating_pairs import added
from ..accounting.events import DpEvent, check_delta, check_epsilon, positive_count
from ..errors import ArgumentError, ArgumentTypeError
from ..noise import GaussianNoise
from ..processes import Lock
from .certificates import Certificate, FiniteRunLangevin, Setting
from .certificates.certificate import ROUND_UP, TooFar
from .certificates.finite_run_langevin import StepTooLarge
from .glm import GLM
from .models import Model
from .softmax import Softmax

DEFAULT_CERTIFICATE = FiniteRunLangevin(steps=10_000)
_DELTA_IN_WORDS = 1e-5  # δ in the text of a guarantee if none was given
_ANOTHER = "make a new OnePosteriorSample with a larger epsilon or another accountant."
_LEAST_TEMPERING, _PRECISION = 1e-9, 1e-7  # the precision is relative
_charging = Lock()


class OnePosteriorSample:
    r"""Releases one draw from a posterior with a tempered likelihood, with its privacy guarantee.

    .. math:: \theta \sim p_\rho(\theta \mid x) \propto p(\theta) \prod_i p(x_i \mid \theta)^\rho

    A draw from a posterior is private without added noise if no record can change the density much.
    The certificate bounds this change. If ``epsilon`` is given, ρ is the largest number up to 1 at
    which all charges, including this draw, meet (``epsilon``, ``delta``). Otherwise ρ = 1.

    Source: Wang, Fienberg, Smola (2015), "Privacy for free", Algorithm 1 and Proposition 9.

    Args:
        model: a :class:`~torch_dpbayes.ops.GLM`, a :class:`~torch_dpbayes.ops.Softmax`, or a Pyro
            model with one data plate named "data" that gets its data as arguments.
        certificate: bounds a record's influence, and makes the draw. The default, 10,000 steps of
            Langevin dynamics, is for a GLM.
        epsilon: target ε of all charges on the accountant after one draw. None: no tempering.
        delta: δ of the target. None: the accountant's.
        accountant: where draws are charged. None: a new one for replace-one, with the target as
            its budget.
        num_data: the number of records, a public constant; under add-or-remove-one an upper bound
            for both neighbouring data sets. None: the number of records in the data, only under
            replace-one, where it is public.

    Raises:
        ValueError, TypeError: an argument is out of range, or the certificate does not hold for
            this model.

    **Privacy.** :meth:`sample` charges the certificate's event to the accountant, then releases one
    draw; each draw is one such charge. Nothing else about the chain is released: no path, no
    acceptance rate, no diagnostic, no exception or log line that depends on a record's value.
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
    ) -> None:
        if not isinstance(certificate, Certificate):
            raise ArgumentTypeError(
                "certificate must be one of torch_dpbayes.ops' certificates, such as"
                f" FiniteRunLangevin(steps=1000), got {certificate!r}."
            )
        if delta is None and accountant is not None:
            delta = accountant.delta
        if epsilon is not None:
            epsilon = check_epsilon(epsilon)
            if delta is None:
                raise ArgumentError(
                    "a target needs both numbers: OnePosteriorSample(..., epsilon=1.0, delta=1e-5)"
                )
        if accountant is None:
            accountant = PrivacyAccountant(epsilon, delta, neighboring="replace_one")
        self._is_count_public = accountant.neighboring == "replace_one"
        self._model = _as_model(model, self._is_count_public)
        certificate.check(self._model)
        self._certificate, self._accountant = certificate, accountant
        self._epsilon, self._delta = epsilon, None if delta is None else check_delta(delta)
        self._num_data = None if num_data is None else positive_count(num_data, "num_data")
        self._needs_num_data = certificate.needs_num_data(self._model)
        self._solved: dict[int | None, Setting] = {}  # by number of records
        self._last_num_data: int | None = None

    @property
    def _numbers(self) -> dict[str, Any]:
        target = {} if self._epsilon is None else {"epsilon": self._epsilon, "delta": self._delta}
        return {"model": self._model, "certificate": self._certificate, **target}

    def __repr__(self) -> str:
        return words.one_line(self, self._numbers, self._accountant)

    def _repr_html_(self) -> str:
        return words.html(self, self._numbers, self._accountant)

    # --- known without the data -------------------------------------------------------------------

    @property
    def accountant(self) -> PrivacyAccountant:
        """The accountant that draws are charged to."""
        return self._accountant

    @property
    def tempering(self) -> float:
        """ρ, the factor of the log likelihood; it does not depend on the data."""
        return self._setting().tempering

    @property
    def variance_inflation(self) -> float:
        """1 + 1/ρ: the asymptotic variance of the draw as an estimate, divided by that of the
        maximum likelihood estimate (Wang, Fienberg, Smola 2015, Proposition 9).

        A Wald interval around a draw from n records is draw ± quantile · √((1 + 1/ρ) I⁻¹/n), with
        the Fisher information I at the draw. It ignores the bias of the prior, of clipping, and of
        a chain that is too short. A Langevin chain's step size multiplies 1/ρ by up to 1/(1 −
        hM/2): by 2 for the default step of :class:`~torch_dpbayes.ops.FiniteRunLangevin`. For
        intervals choose h ≤ 0.1/M.
        """
        return 1 + 1 / self.tempering

    @property
    def event(self) -> DpEvent:
        """The event of one draw."""
        return self._certificate.event(self._model, self._setting())

    def guarantee(self) -> str:
        """A text that states the cost of one draw, the proof and the assumptions. It does not
        depend on data. For a GLM it needs ``num_data`` or an earlier draw.
        """
        setting, event, held = self._setting(), self.event, self._accountant
        alone = PrivacyAccountant(method=held.method, neighboring=held.neighboring).compose(event)
        delta = self._delta if self._delta is not None else _DELTA_IN_WORDS
        proved, assumed = self._certificate.statement(self._model, setting)
        change = "replaced" if setting.neighboring == "replace_one" else "added or removed"
        nothing = "nothing about data, model or convergence; floating-point numbers count as real"
        return "\n".join(
            [
                f"One posterior sample, certificate {type(self._certificate).__name__}, log"
                f" likelihood tempered by rho = {setting.tempering:.6g}",
                f"  one draw    {event}: epsilon = {alone.get_epsilon(delta):.5g} at delta ="
                f" {delta:g} when one record is {change}; n draws cost n times this event",
                *(f"  proved      {line}" for line in proved),
                *(
                    [f"  ASSUMED     {line}" for line in assumed]
                    or [f"  assumed     {nothing} numbers"]
                ),
            ]
        )

    # --- the release ------------------------------------------------------------------------------

    def sample(self, *data: Any) -> dict[str, Tensor]:
        """Charge one release, then draw.

        Args:
            *data: for a GLM the features ``[n, d]`` and the targets ``[n]``; the chain runs on the
                features' device. For a Pyro model its arguments.

        Returns:
            The draw by name, in the user's constrained space: ``{"weights": [d]}`` for a GLM (``[K,
            d]`` for a Softmax), values of the latents for a Pyro model.

        Raises:
            PrivacyBudgetExceeded: the draw would exceed the target or the accountant's budget.
                Nothing is released. A charge stays only if others charged at the same time.
            ValueError, TypeError: shapes do not fit. Nothing is charged.

        **Privacy.** The returned draw is released; its event is :attr:`event`.
        """
        # sums over records must not be in half precision, and samplers need autograd
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
        ):
            data = self._model.prepare(data)
            num_data = self._count(self._model.num_records(data))
            setting = self._setting(num_data)
            self._charge(self._certificate.event(self._model, setting))
            self._last_num_data = num_data
            theta = self._certificate.draw(self._model, data, setting, GaussianNoise())
            return self._model.release(theta)

    def _charge(self, event: DpEvent) -> None:
        label = f"one posterior sample ({type(self._certificate).__name__})"
        target = f"the target epsilon = {self._epsilon} at delta = {self._delta}: {_ANOTHER}"
        with _charging:  # without it, two simultaneous draws could both be refused
            if self._passes_target(event):
                raise PrivacyBudgetExceeded(
                    f"each draw is a release, and another draw would exceed {target}"
                )
            self._accountant.compose(event, label=label)
            # other threads and processes may charge the same accountant in between
            if self._passes_target():
                raise PrivacyBudgetExceeded(
                    "Nothing was drawn, but the charge stays: together with other charges it"
                    f" exceeds {target}"
                )

    def _passes_target(self, *more: DpEvent) -> bool:
        if self._epsilon is None or self._delta is None:
            return False
        return epsilon_with(self._accountant, self._delta)(*more) > self._epsilon * ROUND_UP

    # --- the tempering ----------------------------------------------------------------------------

    def _count(self, found: int) -> int | None:
        """N for the certificate: ``found`` if it is public, else the stated number."""
        stated = self._num_data
        if stated is not None and (found > stated or (self._is_count_public and found != stated)):
            shown = f"there are {found}" if self._is_count_public else "there are more records"
            raise ArgumentError(
                f"num_data = {stated} was stated, but {shown}: pass their number; under"
                " add-or-remove-one an upper bound for every data set, chosen without the"
                " data.",
                code="num-data",
            )
        return found if self._is_count_public else stated

    def _setting(self, num_data: int | None = None) -> Setting:
        """The setting for ``num_data`` records. None: the stated number, or the last draw's."""
        if not self._needs_num_data:
            num_data = None
        elif num_data is None:
            num_data = self._num_data if self._last_num_data is None else self._last_num_data
        if self._needs_num_data and num_data is None:
            raise ArgumentError(
                "the guarantee depends on the number of records: pass OnePosteriorSample(...,"
                " num_data=N), under add-or-remove-one an upper bound for every data set; under"
                " replace-one you can also draw first.",
                code="num-data",
            )
        if num_data not in self._solved:
            self._solved[num_data] = self._solve(num_data)
        return self._solved[num_data]

    def _solve(self, num_data: int | None) -> Setting:
        """The setting with the largest tempering at which all charges together meet the target."""
        full = Setting(1.0, num_data, self._accountant.neighboring)
        if self._epsilon is None or self._delta is None:
            return full
        costs = epsilon_with(self._accountant, self._delta)

        def event(tempering: float) -> DpEvent:
            return self._certificate.event(self._model, full._replace(tempering=tempering))

        def cost(tempering: float) -> float:
            try:
                return costs(event(tempering))
            # M grows with the tempering: a given step size may then be too large, and a given
            # distance to the target cost too much
            except (StepTooLarge, TooFar):
                return math.inf

        found = largest_tempering(cost, self._epsilon)
        if found is None:
            event(_LEAST_TEMPERING)  # raises if the certificate is the reason
            raise ArgumentError(
                f"epsilon = {self._epsilon:g} at delta = {self._delta:g} cannot be met after"
                " earlier charges: use a larger epsilon, an empty accountant, or a certificate"
                " with a smaller delta.",
                code="budget-spent",
            )
        with suppress(TooFar):  # raises if the step size limits the tempering
            event(min(1.0, found * (1 + 10 * _PRECISION)))
        return full._replace(tempering=found)


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
            "a torch module has no prior: write a Pyro model, or use"
            " dpb.noise_aware.posterior_for_module or dpb.PrivacyEngine."
        )
    return PyroModel(model, count_is_public=count_is_public)


def epsilon_with(accountant: PrivacyAccountant, delta: float) -> Callable[..., float]:
    """A function that returns ε at ``delta`` of the accountant's present charges and of further
    events, by the accountant's method.

    Raises:
        ArgumentError: the accountant guarantees only its whole budget, and nothing below it.
    """
    if accountant.is_later_job or accountant.guarantee != "fixed":
        raise ArgumentError(
            "after adaptive charges, or for a later job, the guarantee is always the accountant's"
            " whole budget: leave out epsilon= and choose a certificate that fits the budget.",
            code="budget-whole",
        )
    bound = renyi if accountant.method == "rdp" else bounds
    relation = accountant.neighboring
    held = counts_of(accountant.history, relation)

    def epsilon(*events: DpEvent) -> float:
        more = counts_of([(event, 1) for event in events], relation)
        return bound.upper_epsilon(added(held, more), delta)

    return epsilon


def largest_tempering(cost: Callable[[float], float], epsilon: float) -> float | None:
    """The largest ρ in [1e-9, 1] with ``cost(ρ)`` ≤ ``epsilon``, to a relative precision of 1e-7,
    and never a larger ρ. ``cost`` does not decrease, and is infinite if there is no certificate.
    None: even ρ = 1e-9 costs too much.
    """

    def excess(minus_log: float) -> float:  # nearly linear, as ε is nearly proportional to ρ
        ratio = cost(math.exp(-minus_log)) / epsilon
        return math.log(ratio) if ratio > 0 else -bounds.LARGEST_EXCESS

    found = crossing(excess, 0.0, -math.log(_LEAST_TEMPERING), _PRECISION)
    return None if found is None else math.exp(-found)
