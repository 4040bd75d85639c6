"""Lightning: logs ε during training, and raises an error if the private loader was replaced."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from ..errors import StateError
from ..optim.base import PrivateOptimizer
from ..per_sample.gradient_source import GradientSource
from .stays_private import StaysPrivate


class PrivacyCallback(StaysPrivate, Callback):
    """Logs ``epsilon``, ``clip_norm``, ``temperature`` and ``noise_multiplier`` after every epoch,
    in the progress bar too, and refuses a run that is not private.

    Pass the network inside the ``LightningModule`` to ``make_private``, not the module itself,
    because Lightning writes to the module during training. ``configure_optimizers`` must return the
    private optimizer, and ``trainer.fit`` needs the private loader. Train on one device: with
    several, Lightning averages gradients without noise.

    Args:
        engine: the engine that made network, optimizer and loader private.
        delta: δ of the logged ε; None: that of the budget.

    Raises:
        RuntimeError: when training starts: the loader or the optimizer is not the private one.
        ValueError: when training starts: there is no δ.

    **Privacy.** ε is a function of public constants. The training loss that a module logs is
    computed from the records, without noise.
    """

    framework = "Lightning"
    pass_loader = "pass the loader of make_private to trainer.fit, on one device"
    pass_optimizer = "return the optimizer of make_private from configure_optimizers"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise unless loader and optimizer are the private ones."""
        if GradientSource.attached_to(pl_module) is not None:
            raise StateError(
                "the LightningModule itself was made private, but Lightning writes to it during"
                " training: pass the network inside it, make_private(module=self.net, ...)",
                code="framework-module",
            )
        self.require_private(trainer.train_dataloader, list(trainer.optimizers))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log ε of everything that was charged, and the numbers of the last step."""
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, PrivateOptimizer):
                pl_module.log_dict(self.numbers(optimizer), prog_bar=True)
