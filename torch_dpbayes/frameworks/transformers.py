"""Hugging Face's Trainer: logs ε during training, and raises an error if the private loader was
replaced.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..errors import StateError
from .stays_private import StaysPrivate


class PrivacyCallback(StaysPrivate, TrainerCallback):
    """Adds ``epsilon``, ``clip_norm``, ``temperature`` and ``noise_multiplier`` to what ``Trainer``
    logs, and refuses a run that is not private.

    Pass the private optimizer by ``optimizers=(optimizer, None)``. Write a subclass of ``Trainer``
    whose ``get_train_dataloader`` returns the private loader. Set the model's ``accepts_loss_kwargs
    = False``; otherwise ``Trainer`` divides losses by the number of labels in the batch.

    Args:
        engine: the engine that made model, optimizer and loader private.
        delta: δ of the logged ε; None: that of the budget.

    Raises:
        RuntimeError: when training starts: the loader or the optimizer is not the private one.
        ValueError: when training starts: there is no δ.

    **Privacy.** ε is a function of public constants. The training loss in the same log is computed
    from the records, without noise.
    """

    framework = "Trainer"
    pass_loader = "return the loader of make_private from get_train_dataloader of a subclass"
    pass_optimizer = "write Trainer(..., optimizers=(optimizer, None)) with make_private's"

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raise unless loader and optimizer are the private ones."""
        if args.gradient_accumulation_steps > 1:
            raise StateError(
                f"gradient_accumulation_steps = {args.gradient_accumulation_steps} adds up"
                " batches, but each batch needs its own step: leave it out, and use a larger"
                " batch",
                code="framework-replaced",
            )
        optimizer = kwargs.get("optimizer")
        inside = getattr(optimizer, "optimizer", optimizer)  # without accelerate's wrapper
        self.require_private(kwargs.get("train_dataloader"), [inside])

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add ε of everything that was charged, and the numbers of the last step."""
        optimizer = kwargs.get("optimizer")
        shown = self.numbers(getattr(optimizer, "optimizer", optimizer))
        for log in (logs, *state.log_history[-1:]):  # log_history has a copy that was made before
            if log is not None:
                log.update(shown)
