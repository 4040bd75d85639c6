"""The supported models: generalised linear models, multinomial logistic regression, and the last
layer of a network.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..density import RecordStatistics, UnfitModel
from ..errors import ArgumentError, ArgumentTypeError
from ..noise import check_positive
from ..ops.glm import GLM
from ..ops.softmax import Softmax

Likelihood = Literal["categorical", "bernoulli", "normal"]

_LIKELIHOODS = ("categorical", "bernoulli", "normal")
_LARGEST_LOG_RATE = 50.0  # beyond, counts of a Poisson law are too large to be drawn
_SYNTHETIC_ROWS = 5


def model_of(model: GLM | Softmax, num_columns: int) -> Callable[..., None]:
    """The Pyro model of features ``[n, d]`` and targets ``[n]``.

    Raises:
        ValueError: the prior is improper.
    """
    if isinstance(model, Softmax):
        scales = torch.full((model.num_classes, num_columns), model.prior_std, dtype=torch.float64)
        return partial(_linear_model, "categorical", scales, 1.0, None)
    precision = model.prior_precision.expand(num_columns)
    if not bool((precision > 0).all()):
        raise ArgumentError(
            "the prior is improper (prior_std is infinite), but the posterior is the prior if"
            " noise hides the data. Pass prior_std=."
        )
    scales = precision.rsqrt().clone()
    return partial(_linear_model, model.family, scales, model.noise_std, model.max_count)


def targets_of(model: GLM | Softmax, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Features as floats, and targets for the Pyro model, clamped as in the GLM."""
    features = features if features.is_floating_point() else features.float()
    if isinstance(model, Softmax):
        return features, targets
    targets = targets.to(features)
    if model.family != "gaussian":
        targets = targets.clamp(0.0, 1.0 if model.max_count is None else model.max_count)
    return features, targets


def _observe(family: str, output: Tensor, std: Any, max_count: Any, targets: Tensor) -> None:
    """Observe targets given linear predictors ``[n]``, or one for each class ``[n, K]``."""
    law: Any
    if family == "categorical":
        law = dist.Categorical(logits=output)
    elif family == "bernoulli":
        law = dist.Bernoulli(logits=output)
    elif family == "poisson":
        law = ClampedPoisson(output.clamp(max=_LARGEST_LOG_RATE).exp(), max_count)
    else:
        law = dist.Normal(output, std)
    with pyro.plate("data", len(targets)):
        pyro.sample("targets", law.to_event(len(law.batch_shape) - 1), obs=targets)


class ClampedPoisson(dist.Poisson):
    """min(Y, c) of a Poisson count Y: c has the probability of all counts of at least c."""

    def __init__(self, rate: Tensor, largest: float) -> None:
        super().__init__(rate, validate_args=False)  # c may be fractional
        self._largest = largest

    def expand(self, batch_shape: Any, _instance: Any = None) -> ClampedPoisson:
        return ClampedPoisson(self.rate.expand(batch_shape), self._largest)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        drawn: Tensor = super().sample(sample_shape)
        return drawn.clamp_max(self._largest)

    def log_prob(self, value: Tensor) -> Tensor:
        own, least = super().log_prob(value), torch.full_like(self.rate, math.ceil(self._largest))
        rest = torch.special.gammainc(least.double(), self.rate.double())
        tiny = 1e-300  # below, the first of these counts has nearly all the probability
        log_rest = torch.where(rest > tiny, rest.clamp_min(tiny).log(), super().log_prob(least))
        return torch.where(value < self._largest, own, log_rest.to(own))


def _linear_model(
    family: str, prior_std: Tensor, std: Any, max_count: Any, features: Tensor, targets: Tensor
) -> None:
    """A Pyro model with the site ``"weights"``: ``[d]``, or ``[K, d]`` for K classes."""
    scale = prior_std.to(features)
    prior = dist.Normal(torch.zeros_like(scale), scale).to_event(scale.dim())
    output = features @ pyro.sample("weights", prior).movedim(-1, 0)
    _observe(family, output, std, max_count, targets)


# -- the last layer of a network -------------------------------------------------------------------


class LastLayer:
    """A network whose only trainable parameters are those of its last layer, which is linear: a
    Pyro model of the layer, and the features from the frozen rest. The network is copied, in eval
    mode.

    Raises:
        ValueError: other parameters are trainable, or the output is not the layer's.

    **Privacy.** Each row of features is a function of one record: the frozen rest runs under a map
    over records. Its parameters count as public.
    """

    def __init__(self, module: nn.Module, likelihood: Likelihood, prior_std: float) -> None:
        if not isinstance(module, nn.Module):
            raise ArgumentTypeError(
                f"module must be a torch.nn.Module, got {type(module).__name__}."
            )
        if likelihood not in _LIKELIHOODS:
            raise ArgumentError(f"likelihood must be one of {_LIKELIHOODS}, got {likelihood!r}.")
        self.prior_std = check_positive("prior_std", prior_std, "of every weight")
        trainable = [name for name, p in module.named_parameters() if p.requires_grad]
        name = trainable[0].rpartition(".")[0] if trainable else ""
        layer = module.get_submodule(name)
        parts = dict(layer.named_parameters(recurse=False))
        own = [part for part in ("weight", "bias") if part in parts]
        self.names: dict[str, str] = {part: f"{name}.{part}".lstrip(".") for part in own}
        if not isinstance(layer, nn.Linear) or set(trainable) != set(self.names.values()):
            raise UnfitModel(
                "the trainable parameters must be those of one torch.nn.Linear, the last layer,"
                " with its bias: freeze all others (requires_grad_(False))."
            )
        self.linear = copy.deepcopy(layer).requires_grad_(False).eval()
        self.likelihood = likelihood
        outputs = layer.out_features
        fits = {"categorical": outputs > 1, "bernoulli": outputs == 1, "normal": True}
        if not fits[likelihood]:
            raise UnfitModel(
                f"likelihood={likelihood!r} does not fit {outputs} outputs: categorical needs one"
                " for each class, bernoulli one logit."
            )
        self._module = copy.deepcopy(module).requires_grad_(False).eval()
        self._body: nn.Module = nn.Identity()
        if name:
            self._body = copy.deepcopy(self._module)
            self._body.set_submodule(name, nn.Identity())

    def features(self, inputs: Tensor) -> Tensor:
        """``[n, d]``, each row a function of its own input. Private data.

        Raises:
            ValueError: inputs are not floats, or the output is not the layer's, which is checked on
                synthetic rows.
        """
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.dim() < 2:
            raise UnfitModel(
                "inputs must be a float tensor with records along dimension 0: otherwise compute"
                " the features, and pass a torch.nn.Linear as module."
            )
        with torch.no_grad():
            synthetic = torch.randn(_SYNTHETIC_ROWS, *inputs.shape[1:]).to(inputs)
            found = self._features(synthetic)
            if found.shape[1] != self.linear.in_features:
                raise UnfitModel("the layer's input must be one vector per record.")
            expected = self._module(synthetic)
            if not torch.allclose(self.linear(found), expected, rtol=1e-3, atol=1e-4):
                raise UnfitModel(
                    "the output is not that of the trainable layer, or the module mixes records:"
                    " the layer must come last, without a softmax, and each record must be"
                    " independent."
                )
            found = self._features(inputs)
            return torch.where(found.isfinite().all(1, keepdim=True), found, 0.0)

    def _features(self, inputs: Tensor) -> Tensor:
        """The features; zeros if the computation fails, because an error would reveal a record."""
        each = RecordStatistics(lambda x: self._body(x[None])[0], [inputs.detach()])
        return torch.cat([inputs.new_zeros(0, each.size), *each.by_chunks()])

    def __call__(self, features: Tensor, targets: Tensor) -> None:
        """The Pyro model of the layer."""
        values = {}
        for name, p in self.linear.named_parameters():
            prior = dist.Normal(torch.zeros_like(p), torch.full_like(p, self.prior_std))
            values[name] = pyro.sample(self.names[name], prior.to_event(p.dim()))
        output = functional_call(self.linear, values, (features,))
        std: Any = 1.0
        if self.likelihood == "normal" and output.shape[1] == 2:
            std = (output[:, 1] / 2).exp()
        if self.likelihood != "categorical" and output.shape[1] < 3:
            output = output[:, 0]
        _observe(self.likelihood, output, std, None, targets)
