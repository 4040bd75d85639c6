"""A front door that lets canaries in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..accounting.accountant import PrivacyAccountant
from ..batches.poisson_loader import PoissonLoader
from ..engine.privacy_engine import PrivacyEngine
from ..errors import AuditError
from ..optim.base import PrivateOptimizer
from .canaries import GradientCanaries


class AuditedEngine(PrivacyEngine):
    """A :class:`~torch_dpbayes.PrivacyEngine` whose first ``make_private`` lets canaries in.

    Args:
        accountant, process_group: as there.
        canaries: those that have gradients and no records; None: the data set holds them all.
        try_model: called with the model before it is trained, and raises where the canaries of the
            data set are none for it.
    """

    def __init__(
        self,
        accountant: PrivacyAccountant | None,
        process_group: torch.distributed.ProcessGroup | None,
        canaries: GradientCanaries | None,
        try_model: Callable[[nn.Module], None] = lambda _: None,
    ) -> None:
        super().__init__(accountant, process_group)
        self._canaries, self._try_model = canaries, try_model
        self.is_used = False

    def make_private(self, **options: Any) -> Any:
        """As :meth:`~torch_dpbayes.PrivacyEngine.make_private`, once."""
        self._require_auditable(options)
        return self._audited(*super().make_private(**options))

    def make_private_with_epsilon(self, **options: Any) -> Any:
        """As :meth:`~torch_dpbayes.PrivacyEngine.make_private_with_epsilon`, once."""
        self._require_auditable(options)
        return self._audited(*super().make_private_with_epsilon(**options))

    def _require_auditable(self, options: dict[str, Any]) -> None:
        own = self._accountant
        if options.get("user_ids") is not None or (own is not None and own.unit == "person"):
            raise AuditError(
                "a canary is one record, which shows nothing of the ε of users: audit the run"
                " without user_ids=, charged to an accountant of records"
            )
        if self.is_used:
            raise AuditError(
                "train called make_private twice, and one audit is of one run: audit each alone"
            )

    def _audited(self, module: Any, optimizer: PrivateOptimizer, loader: PoissonLoader) -> Any:
        if self._canaries is not None:
            self._canaries.attach(optimizer, loader)
        self._try_model(module)
        self.is_used = True
        return module, optimizer, loader
