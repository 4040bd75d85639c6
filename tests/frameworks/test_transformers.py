"""Hugging Face's Trainer trains privately by the page's recipe; whatever else it does ends in an
error.
"""

import pytest
import torch
import torch.nn.functional as F
from support import frameworks
from support.frameworks import DELTA, moves_nothing
from support.refusals import refused
from torch.utils.data import DataLoader

RECORDS, BATCH, EPOCHS = 40, 8, 2
pytestmark = pytest.mark.slow


def sentences():
    from datasets import Dataset

    words = torch.randint(1, 50, (RECORDS, 6))
    columns = {
        "input_ids": words.tolist(),
        "attention_mask": torch.ones_like(words).tolist(),
        "labels": (words[:, 0] % 2).tolist(),
    }
    return Dataset.from_dict(columns).with_format("torch")


def classifier():
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_labels": 2}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 8}
    net = BertForSequenceClassification(BertConfig(**sizes)).train()
    net.config.use_cache = False  # as Trainer would write it there
    net.accepts_loss_kwargs = False  # or Trainer counts labels over the batch
    net.bert.embeddings.position_embeddings.requires_grad_(False)
    return net


def made():
    """Engine, model, optimizer and loader of sentences."""
    return frameworks.made(
        module=classifier(),
        data_loader=DataLoader(sentences(), batch_size=BATCH),
        example_inputs={"input_ids": torch.randint(1, 50, (2, 6))},
    )


def mean_loss(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs.logits, labels)


LOSSES = pytest.mark.parametrize("loss", [None, mean_loss], ids=["of the model", "given"])


def trainer_of(folder, net, loader, optimizer, *, engine=None, loss=mean_loss, own=False, **more):
    """A trainer, with the callback of an engine; ``own``: with a loader of its own."""
    from transformers import Trainer, TrainingArguments

    from torch_dpbayes.frameworks.transformers import PrivacyCallback

    class PrivateTrainer(Trainer):
        def get_train_dataloader(self):
            return super().get_train_dataloader() if own else loader

    arguments = TrainingArguments(
        folder,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        **more,
    )
    return PrivateTrainer(
        net,
        arguments,
        train_dataset=loader.dataset,
        callbacks=[] if engine is None else [PrivacyCallback(engine, DELTA)],
        optimizers=(optimizer, None),
        compute_loss_func=loss,
    )


@pytest.mark.parametrize("bf16", [False, True])
@LOSSES
def test_the_recipe_charges_each_step_and_shows_epsilon(loss, bf16, tmp_path):
    engine, net, optimizer, loader = made()
    start = [p.detach().clone() for p in net.parameters()]
    given = {"engine": engine, "loss": loss, "logging_steps": 1, "bf16": bf16}
    trainer = trainer_of(tmp_path, net, loader, optimizer, **given)
    trainer.train()
    assert len(engine.accountant) == EPOCHS * len(loader) == trainer.state.global_step
    for before, p in zip(start, net.parameters()):
        assert bool((before != p).any()) is p.requires_grad
    shown = [log["epsilon"] for log in trainer.state.log_history]
    assert shown == sorted(shown)
    assert shown[-1] == pytest.approx(engine.get_epsilon(DELTA), rel=1e-9)


# what Trainer can do to a private run, and whether it is told so without the callback
REPLACED = {
    "its own loader": True,
    "its own optimizer": False,  # there is no gradient, and nothing moves
    "both": True,
    "accumulation": True,
}


@pytest.mark.parametrize("has_callback", [True, False])
@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_ends_in_an_error(name, has_callback, tmp_path):
    engine, net, optimizer, loader = made()
    trainer = trainer_of(
        tmp_path,
        net,
        loader,
        None if name in ("its own optimizer", "both") else optimizer,
        engine=engine if has_callback else None,
        own=name in ("its own loader", "both"),
        gradient_accumulation_steps=2 if name == "accumulation" else 1,
    )
    moves_nothing(trainer.train, engine, net, has_callback or REPLACED[name])


@LOSSES
def test_a_count_over_the_batch_is_refused(loss, tmp_path):
    engine, net, optimizer, loader = made()
    del net.accepts_loss_kwargs
    with refused("model-input"):
        trainer_of(tmp_path, net, loader, optimizer, loss=loss).train()
    assert len(engine.accountant) == 0
