"""Several releases on one account, audited together."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ..accounting.accountant import PrivacyAccountant
from ..errors import AuditError
from .bounds import Array
from .canaries import WithPlaces
from .coin import Coins, auditor, toss
from .result import AuditResult, Pricing
from .training_run import Train, delta_of, finished, require_enough, white_box
from .transcripts import from_scores

_THREAT = (
    "the whole history: {count} releases on one account, whose scores of the same canaries are"
    " added up; {each}"
)


class History:
    r"""Audits all releases of one accountant, or of its ledger, together: several trainings, and
    other releases between them.

    .. math:: s_i = \sum_j \log \frac{p_j(\text{seen} \mid i \text{ in})}{p_j(\text{seen} \mid i
        \text{ out})}

    The same canaries, with the same coins, are in the data of every release or in none. What
    releases say of a canary adds up: log likelihood ratios, and Gaussian scores by the distance
    that they were made with, are added with weight 1, which is best where the releases' noises are
    independent. The total is guessed from once, and its lower bound stands beside the ε that the
    accountant states for everything on it.

    What it tests is one hypothesis about the whole history, taken as one release: that it keeps the
    trade-off curve that the accountant states for everything on it (with ``bound="basic"``, its ε
    at δ). Bound and verdict are right with their confidence whatever the scores and their weights
    are, and however a release depends on earlier ones, as long as the coins decide nothing but the
    canaries' presence.
    Releases on the account that were not audited make them no less right, only the bound lower.

    One look is tested for. Who looks after every release, and stops when ε is refuted, has tested
    several times: after :meth:`result`, nothing can be added.

    Args:
        accountant: of all the releases; with ``path=``, of the ledger that they share.
        num_canaries: m; thousands.
        delta: δ at which to compare; None: that of the accountant's budget.
        confidence, bound: as for :func:`one_run`; ``"independent"`` needs all releases to show each
            canary apart.
        seed: of coins and directions; None: the operating system's entropy.

    Attributes:
        coins: which canaries are in the data, for releases that are made elsewhere.

    Raises:
        ValueError: too few canaries for any bound, or no δ.

    **Privacy.** As for :func:`one_run`: the result is for the audit, and so are models and draws
    that were made with canaries. Their charges stay on the accountant: audit a copy of an account,
    not the one that your own releases are charged to.
    """

    def __init__(
        self,
        accountant: PrivacyAccountant,
        *,
        num_canaries: int,
        delta: float | None = None,
        confidence: float = 0.95,
        bound: str = "gaussian",
        seed: int | None = None,
    ) -> None:
        self._accountant, self._delta = accountant, delta_of(accountant, delta)
        self._pricing = Pricing(bound, self._delta, confidence)
        require_enough(num_canaries, self._pricing, accountant.epsilon)
        self._generator = auditor(seed)
        self._coins = toss(num_canaries, self._generator)
        self._scores: Array = np.zeros(num_canaries)
        self._threats: list[str] = []
        self._is_priced = False

    @property
    def coins(self) -> Coins:
        return self._coins.copy()

    def train(
        self,
        train: Train,
        dataset: Any,
        *,
        scores: str = "sums",
        process_group: torch.distributed.ProcessGroup | None = None,
    ) -> Any:
        """Train once, on data with the canaries in it, and add what the releases say of them.

        Args:
            train, dataset, scores, process_group: as for :func:`one_run`; canaries are white-box.

        Returns:
            What ``train`` returns; it has learned the canaries.

        Raises:
            ValueError: as for :func:`one_run`, or after :meth:`result`.
        """
        self._require_open()
        gradients, engine, threat = white_box(
            self._coins, self._generator, scores, self._pricing, self._accountant, process_group
        )
        trained = finished(train, WithPlaces(dataset, len(self._coins)), engine)
        if gradients.steps == 0:
            raise AuditError("train took no step with what make_private returned: call opt.step")
        self._add(gradients.scores, threat)
        return trained

    def add(self, scores: Any, *, separation: float | None = None, threat: str = "") -> None:
        """Add what another release says of the canaries.

        Args:
            scores: one for each canary: log p(seen | in) − log p(seen | out); or, with
                ``separation``, numbers with noise of standard deviation 1.
            separation: by how much a canary that is in moves its number, a public number: the
                release's μ where canaries are as different as records can be. A score s counts as
                μs − μ²/2.
            threat: what was seen, for the report.

        Raises:
            ValueError: the scores do not belong to these canaries, the separation is not positive,
                or the history has been priced.
        """
        self._require_open()
        found: Array = np.asarray(scores, dtype=float)
        if found.shape != self._coins.shape:
            raise AuditError(
                f"scores are one for each of {len(self._coins)} canaries, got shape {found.shape}"
            )
        if not np.isfinite(found).all():
            raise AuditError("a score is not finite: leave the canary undecided with score 0")
        if separation is not None:
            if not 0 < separation < math.inf:
                raise AuditError(
                    "separation is how far a canary moves its score, a positive number; got"
                    f" {separation}"
                )
            found = separation * found - separation**2 / 2
        self._add(found, threat or "scores of the caller's")

    def result(self) -> AuditResult:
        """The lower bound on what all releases together reveal, beside the ε of everything that the
        accountant has been charged; once.

        Raises:
            ValueError: nothing was released, or the accountant states no ε.
        """
        self._require_open()
        if not self._threats:
            raise AuditError("nothing was released: call train or add before result")
        each = "; ".join(dict.fromkeys(self._threats))
        result = from_scores(
            self._scores,
            self._coins,
            delta=self._delta,
            accountant=self._accountant,
            confidence=self._pricing.confidence,
            bound=self._pricing.bound,
            threat=_THREAT.format(count=len(self._threats), each=each),
        )
        self._is_priced = True
        return result

    def _add(self, scores: Array, threat: str) -> None:
        self._scores = self._scores + scores
        self._threats.append(threat)

    def _require_open(self) -> None:
        if self._is_priced:
            raise AuditError(
                "this history has been priced, and a second look would need more confidence: audit"
                " a new one, with coins of its own"
            )
