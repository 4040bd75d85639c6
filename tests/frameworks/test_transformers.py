"""Hugging Face's Trainer trains privately by the page's recipe; whatever else it does ends in an
error.
"""

import math

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

    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        num_labels=2,
    )
    net = BertForSequenceClassification(config).train()
    net.config.use_cache = False  # as Trainer would write it there
    net.accepts_loss_kwargs = False  # or Trainer counts labels over the batch
    net.bert.embeddings.position_embeddings.requires_grad_(False)
    return net


def made(data, **options):
    return frameworks.made(
        module=classifier(),
        data_loader=DataLoader(data, batch_size=BATCH),
        example_inputs={"input_ids": torch.randint(1, 50, (2, 6))},
        **options,
    )


def mean_loss(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs.logits, labels)


def trainer_of(folder, net, data, loader, callbacks=(), arguments=None, **options):
    from transformers import Trainer, TrainingArguments

    class PrivateTrainer(Trainer):
        def get_train_dataloader(self):
            return loader if loader is not None else super().get_train_dataloader()

    given = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": BATCH,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "remove_unused_columns": False,
    }
    settings = TrainingArguments(folder, **{**given, **(arguments or {})})
    options = {"compute_loss_func": mean_loss, **options}
    return PrivateTrainer(net, settings, train_dataset=data, callbacks=list(callbacks), **options)


def callback_of(engine):
    from torch_dpbayes.frameworks.transformers import PrivacyCallback

    return PrivacyCallback(engine, DELTA)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("loss", [None, mean_loss], ids=["of the model", "given"])
def test_the_recipe_charges_each_step_and_shows_epsilon(loss, bf16, tmp_path):
    data = sentences()
    engine, net, optimizer, loader = made(data)
    start = [p.detach().clone() for p in net.parameters()]
    trainer = trainer_of(
        tmp_path,
        net,
        data,
        loader,
        callbacks=[callback_of(engine)],
        arguments={"logging_steps": 1, "bf16": bf16},
        optimizers=(optimizer, None),
        compute_loss_func=loss,
    )
    trainer.train()
    assert len(engine.accountant) == EPOCHS * len(loader) == trainer.state.global_step
    for before, p in zip(start, net.parameters()):
        assert bool((before != p).any()) is p.requires_grad
    shown = [log["epsilon"] for log in trainer.state.log_history]
    assert shown == sorted(shown)
    assert math.isclose(shown[-1], engine.get_epsilon(DELTA), rel_tol=1e-9)


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
    data = sentences()
    engine, net, optimizer, loader = made(data)
    options = {} if name in ("its own optimizer", "both") else {"optimizers": (optimizer, None)}
    trainer = trainer_of(
        tmp_path,
        net,
        data,
        None if name in ("its own loader", "both") else loader,
        callbacks=[callback_of(engine)] if has_callback else [],
        arguments={"gradient_accumulation_steps": 2} if name == "accumulation" else None,
        **options,
    )
    moves_nothing(trainer.train, engine, net, has_callback or REPLACED[name])


@pytest.mark.parametrize("loss", [None, mean_loss], ids=["of the model", "given"])
def test_a_count_over_the_batch_is_refused(loss, tmp_path):
    data = sentences()
    engine, net, optimizer, loader = made(data)
    del net.accepts_loss_kwargs
    trainer = trainer_of(
        tmp_path, net, data, loader, optimizers=(optimizer, None), compute_loss_func=loss
    )
    with refused("model-input"):
        trainer.train()
    assert len(engine.accountant) == 0
