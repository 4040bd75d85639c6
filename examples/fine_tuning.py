"""Fine-tunes a transformer privately: all parameters, LoRA adapters, or only the last layer.

    python examples/fine_tuning.py [--model bert | gpt2] [--train all | lora | last] [--epsilon 8]

The program first trains a small BERT or GPT-2 without privacy, on public sentences of one task.
Then it trains on private sentences of another task. All sentences are synthetic. To load your own
model use ``AutoModelForSequenceClassification.from_pretrained``. The example needs the package
``transformers``, and ``--train lora`` needs ``peft``.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
)

import torch_dpbayes as dpb

WORDS, LENGTH, TOPICS = 50, 8, 10


def sentences(n: int) -> Tensor:
    return torch.randint(1, WORDS, (n, LENGTH))


def untrained(model: str) -> nn.Module:
    if model == "gpt2":
        sizes: dict[str, Any] = dict(n_embd=32, n_layer=2, n_head=2, n_positions=LENGTH)
        off = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        config = GPT2Config(vocab_size=WORDS, num_labels=TOPICS, pad_token_id=0, **sizes, **off)
        return GPT2ForSequenceClassification(config)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
            num_labels=TOPICS,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def pretrained(model: str, records: int) -> nn.Module:
    """A network that classifies the topic of a sentence, the last digit of its first word."""
    net, words = untrained(model), sentences(records)
    data = TensorDataset(words, words[:, 0] % TOPICS)
    adam = torch.optim.Adam(net.parameters(), 2e-3)
    for _ in range(4):
        for x, y in DataLoader(data, batch_size=64, shuffle=True):
            adam.zero_grad()
            F.cross_entropy(net(input_ids=x).logits, y).backward()
            adam.step()
    return net


def prepared(net: Any, train: str) -> nn.Module:
    """The network for two classes; only parameters that will be trained are not frozen."""
    last = "score" if hasattr(net, "score") else "classifier"
    setattr(net, last, nn.Linear(32, 2))
    net.num_labels, net.config.use_cache = 2, False
    if train == "lora":
        from peft import LoraConfig, get_peft_model

        targets = ["query", "value"] if last == "classifier" else ["c_attn"]
        adapters = LoraConfig(r=8, lora_alpha=16, target_modules=targets, modules_to_save=[last])
        return get_peft_model(net, adapters)
    if train == "last":
        net.requires_grad_(False)
        getattr(net, last).requires_grad_(True)
    return net


class Logits(nn.Module):
    """The logits of a model of ``transformers``, as one tensor."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.net(input_ids=words).logits
        return logits


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", choices=("bert", "gpt2"), default="bert")
    parser.add_argument("--train", choices=("all", "lora", "last"), default="all")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--records", type=int, default=1024, help="private records")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.1)
    options = parser.parse_args(arguments)

    net = pretrained(options.model, 4 * options.records)
    net = Logits(prepared(net, options.train)).train()
    words, new = sentences(options.records), sentences(2000)  # private and test sentences
    engine = dpb.PrivacyEngine()
    net, optimizer, loader = engine.make_private_with_epsilon(
        module=net,
        optimizer=partial(dpb.optim.DPSGLD, lr=options.lr),  # the clip norm is derived
        data_loader=DataLoader(TensorDataset(words, words[:, 0] % 2), batch_size=64),
        target_epsilon=options.epsilon,
        target_delta=options.delta,
        epochs=options.epochs,
    )
    samples = dpb.PosteriorSamples(likelihood="categorical")
    for _ in range(options.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        samples.collect(net)
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    with torch.no_grad():
        last = net.eval()(new).softmax(1)
    print(f"{trained:,} of {sum(p.numel() for p in net.parameters()):,} parameters trained")
    for name, probabilities in (("average", samples.predict(net, new)), ("last iterate", last)):
        right = (probabilities.argmax(1) == new[:, 0] % 2).double().mean()
        nll = F.nll_loss(probabilities.log(), new[:, 0] % 2)
        print(f"{name}: {100 * right:.1f} % right, NLL {nll:.3f}")
    print(engine.accountant.summary())


if __name__ == "__main__":
    main()
