"""Posterior samples of a network: collect them during training, predict with all of them,
keep them in a file.
"""

import itertools
import math
import os
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils import _pytree as pytree
from tqdm.auto import tqdm

from .errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    DivergedError,
    SamplesError,
    StateError,
)
from .per_sample.fixed_tensors import same_values
from .per_sample.nested import TARGETS, named_inputs

Transform = Callable[[Tensor], Tensor]
Forward = Callable[[nn.Module, Any], Tensor]  # of a model and a batch
Inputs = Tensor | Iterable[Any]
_Sample = dict[str, Tensor]

_FILE_FORMAT = "torch_dpbayes.PosteriorSamples"
_FILE_VERSION = 1

_NO_BATCHES = (
    "x must be a tensor whose first dimension is the record, or a DataLoader; for one batch of"
    " another kind write [batch]."
)

# Small networks are run for several samples at once, which saves the fixed cost of a forward pass;
# stacked parameters beyond the cache would cost more than that.
_ROWS = 256  # of a tensor, predicted at a time
_SOON = 2.0  # seconds after which progress is shown
_GROUP, _LARGEST_IN_GROUP = 16, 20_000  # samples, and numbers in each of them


def softmax(output: Tensor) -> Tensor:
    """Class probabilities from scores: softmax over the last dimension.

    Args:
        output: floating-point tensor ``[n, ..., classes]`` with at least two classes.

    Raises:
        ValueError: the output has no class dimension, or one class only, whose softmax is 1
            whatever the score.
    """
    if output.dim() < 2 or output.shape[-1] < 2:
        raise SamplesError(
            "softmax needs an output of shape [n, ..., classes] with at least two classes, got"
            f" {list(output.shape)}. Pass transform=None for regression, or transform=torch.sigmoid"
            " where one logit stands for two classes."
        )
    return torch.softmax(output, dim=-1)


class PosteriorSamples:
    r"""A bounded set of posterior samples :math:`\theta_1, \dots, \theta_S` of a network, and what
    it predicts.

    The posterior predictive distribution of a record :math:`x` is the average over the samples,

    .. math:: p(y \mid x) = \frac1S \sum_{s=1}^{S} p(y \mid x, \theta_s).

    A sample is a copy of every trainable parameter. Frozen parameters and buffers are not part of
    it: they are taken from the model that is passed to :meth:`predict`.

    Calls of :meth:`collect` are counted. The first ``burn_in`` are discarded, then every
    ``thin``-th is kept, beginning with the first. When ``max_samples`` are kept and another one is
    due, every second of them is dropped and ``thin`` doubles, so the samples stay evenly spaced
    over the whole chain however long it runs, whatever the data.

    Args:
        burn_in: number of ``collect`` calls discarded at the beginning.
        thin: keep every ``thin``-th call after that. The attribute shows the value in force.
        max_samples: the most samples kept in memory, at least 2.

    Raises:
        ValueError: an argument is out of range.

    **Privacy**: the iterates of a private sampler are already paid for, all of them, and copying,
    averaging, saving or publishing them is post-processing: nothing here is charged, and the number
    of samples and of predictions is free. This holds for what the optimizer released, the trainable
    parameters. A buffer that training changes (the running statistics of BatchNorm) carries the
    records without noise, so :meth:`collect` refuses a model whose buffers changed. Predictions at
    private test inputs reveal those inputs: they are covered by no guarantee of the training.
    """

    def __init__(self, burn_in: int = 0, thin: int = 1, max_samples: int = 100) -> None:
        for name, value, smallest in (
            ("burn_in", burn_in, 0),
            ("thin", thin, 1),
            ("max_samples", max_samples, 2),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
                raise ArgumentError(
                    f"{name} must be an integer, at least {smallest} (collect() calls), got"
                    f" {value!r}."
                )
        self.burn_in = burn_in
        self.thin = thin
        self.max_samples = max_samples
        self._num_collected = 0
        self._samples: list[_Sample] = []
        self._shapes: dict[str, torch.Size] | None = None
        self._buffers: dict[str, Tensor] | None = None

    def __len__(self) -> int:
        return len(self._samples)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self)} samples of {self._num_collected} collect() calls, "
            f"burn_in={self.burn_in}, thin={self.thin}, max_samples={self.max_samples})"
        )

    @property
    def num_collected(self) -> int:
        """How often :meth:`collect` was called, discarded calls included."""
        return self._num_collected

    # -- collecting --------------------------------------------------------------------------------

    @torch.no_grad()
    def collect(self, model: nn.Module) -> None:
        """Counts a call and, if it is due, keeps a copy of the model's trainable parameters (same
        device and dtype).

        Args:
            model: the network, in the state that the optimizer's last step left.

        Raises:
            ValueError: the model has no trainable parameter, has other ones than at the first call,
                or has a buffer that changed. The call is then not counted.
            DivergedError: a parameter is not finite.

        **Privacy**: post-processing of the released iterate, no charge. Buffers are compared with
        those of a private model when its loader delivered the first batch, or else with those of
        the first call.
        """
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        shapes = {name: p.shape for name, p in parameters.items()}
        if not parameters:
            raise SamplesError(
                "The model has no trainable parameter, so there is no posterior sample to collect."
            )
        if self._shapes is not None and shapes != self._shapes:
            raise SamplesError(
                "This model's trainable parameters are not those of the model collected before: "
                f"{_difference(self._shapes, shapes)}. Use one PosteriorSamples for one model."
            )
        for name, p in parameters.items():
            if not torch.isfinite(p).all():
                raise DivergedError(
                    f"Parameter {name!r} has non-finite values: the chain diverged, most often"
                    " because lr is too large for the noise and the prior. This sample was not"
                    " collected; restart from finite parameters with a smaller lr."
                )
        self._check_buffers(model)

        self._shapes = shapes
        since_burn_in = self._num_collected - self.burn_in
        self._num_collected += 1
        if since_burn_in < 0 or since_burn_in % self.thin:
            return
        if len(self._samples) == self.max_samples:
            self._samples = self._samples[::2]
            self.thin *= 2
            if since_burn_in % self.thin:
                return
        self._samples.append({name: p.detach().clone() for name, p in parameters.items()})

    def _check_buffers(self, model: nn.Module) -> None:
        buffers = dict(model.named_buffers(remove_duplicate=False))
        before: dict[str, Tensor] | None = getattr(model, "_dpbayes_buffers", None)
        since = "make_private"
        if before is None:
            if self._buffers is None:
                self._buffers = {name: b.detach().clone() for name, b in buffers.items()}
            before, since = self._buffers, "the first collect()"
        # make_private notes frozen parameters as well
        now = {**dict(model.named_parameters(remove_duplicate=False)), **buffers}
        for name in sorted(before.keys() | buffers.keys()):
            if name not in before or name not in now or not same_values(before[name], now[name]):
                raise ArgumentError(
                    f"Buffer {name!r} changed since {since}, by private records and without noise."
                    " Use a layer that keeps no statistics, as GroupNorm for BatchNorm"
                    " (opacus.validators.ModuleValidator.fix), or InstanceNorm without"
                    " track_running_stats.",
                    code="model-buffer",
                )

    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the parameters that are sampled; empty before the first sample."""
        return {name: p.shape for name, p in self._samples[0].items()} if self._samples else {}

    def draws_of(self, name: str) -> np.ndarray[Any, Any]:
        """All samples of one parameter, one row each."""
        return np.stack([_array(sample[name]) for sample in self._samples])

    # -- predicting --------------------------------------------------------------------------------

    def predict(
        self,
        model: nn.Module,
        x: Inputs,
        transform: Transform | None = softmax,
        *,
        forward: Forward | None = None,
    ) -> Tensor:
        r"""The posterior average :math:`\frac1S\sum_s \mathrm{transform}(f(x; \theta_s))`.

        The model is evaluated in eval mode without gradients, then put back as it was; its
        parameters are not touched.

        Args:
            model: a network with the parameters that were collected. Its frozen parameters and
                buffers are used.
            x: ``[n, ...]``, one row a record, or a ``DataLoader``, or any other iterable of
                batches: tensors, tuples whose last item is the target, or mappings, of which the
                model gets by name what it takes. Predicted chunk by chunk, a batch at a time, which
                is all that is moved to the model's device: the model must not mix rows, and the
                first dimension must be the record. A bar shows progress where it takes long.
            transform: applied to one sample's output ``[rows, ...]`` before averaging, keeping the
                first dimension: softmax over the last dimension by default; ``torch.exp`` for
                log-probabilities; ``None`` for regression.
            forward: ``(model, batch) -> output`` where the model returns no tensor or takes its
                inputs in another way, as ``lambda model, batch: model(**batch).logits``.

        Returns:
            The average, ``[n, ...]``, on the model's device, in the dtype of the transformed
            output.

        Raises:
            RuntimeError: no sample is kept yet.
            ValueError: the model has other parameters than the samples; the output does not have
                one row a record.
            TypeError: ``x`` or the model's output is not a tensor.

        **Privacy**: post-processing; see the class about private test inputs.
        """

        def average(groups: Iterator[Tensor]) -> Tensor:
            total, dtype = torch.zeros(()), torch.get_default_dtype()
            for group in groups:
                dtype = group.dtype if group.is_floating_point() or group.is_complex() else dtype
                # at least single precision: a sum of many half-precision values would lose its
                # small terms
                total = total.to(group.device) + group.sum(
                    0, dtype=torch.promote_types(group.dtype, torch.float32)
                )
            return (total / len(self)).to(dtype)

        return torch.cat(self._evaluate(model, x, transform, forward, average))

    def outputs(
        self,
        model: nn.Module,
        x: Inputs,
        transform: Transform | None = None,
        *,
        forward: Forward | None = None,
    ) -> Tensor:
        """The output under every sample, ``[samples, n, ...]`` in the order of collection: draws of
        the function.

        Args:
            model, x, transform, forward: as in :meth:`predict`; here the output is not
                transformed by default.

        Raises:
            RuntimeError, ValueError, TypeError: as :meth:`predict`.

        **Privacy**: post-processing.
        """
        return torch.cat(
            self._evaluate(model, x, transform, forward, lambda groups: torch.cat(list(groups))),
            dim=1,
        )

    def predictive_entropy(
        self,
        model: nn.Module,
        x: Inputs,
        transform: Transform | None = softmax,
        *,
        forward: Forward | None = None,
    ) -> Tensor:
        r"""Entropy of the posterior predictive distribution, :math:`H[\frac1S\sum_s p(y\mid
        x,\theta_s)]`, in nats.

        The total uncertainty of a prediction: noise in the label as well as doubt about the
        parameters.

        Args:
            model, x, forward: as in :meth:`predict`.
            transform: turns one sample's output into probabilities over the last dimension.

        Returns:
            ``[n, ...]``, the output's shape without its last dimension.

        Raises:
            RuntimeError, ValueError, TypeError: as :meth:`predict`; a ``ValueError`` too if the
                transformed output is not a probability distribution over its last dimension.

        **Privacy**: post-processing.
        """
        return torch.cat(
            self._evaluate(model, x, transform, forward, lambda groups: self._entropies(groups)[0])
        )

    def mutual_information(
        self,
        model: nn.Module,
        x: Inputs,
        transform: Transform | None = softmax,
        *,
        forward: Forward | None = None,
    ) -> Tensor:
        r"""Mutual information of label and parameters, in nats: what the samples disagree about.

        .. math:: I[y; \theta \mid x] = H\Big[\frac1S\sum_s p(y\mid x,\theta_s)\Big]
                  - \frac1S\sum_s H[p(y\mid x,\theta_s)] \ge 0

        (Houlsby et al., 2011, "Bayesian active learning for classification and preference
        learning", equation 2).

        Args, returns, raises: as :meth:`predictive_entropy`.

        **Privacy**: post-processing.
        """

        def difference(groups: Iterator[Tensor]) -> Tensor:
            total, expected = self._entropies(groups)
            return (total - expected).clamp_min(0)  # rounding alone can make it negative

        return torch.cat(self._evaluate(model, x, transform, forward, difference))

    def _entropies(self, groups: Iterator[Tensor]) -> tuple[Tensor, Tensor]:
        """Entropy of the average distribution, and average entropy of the distributions."""
        average = entropy = torch.zeros(())
        for group in groups:
            group = group.to(torch.promote_types(group.dtype, torch.float32))
            if not ((group.sum(-1) - 1).abs() < 0.01).all() or not (group >= 0).all():
                raise SamplesError(
                    "The transformed output is not a probability distribution over its last"
                    " dimension. Pass a transform that makes it one: softmax (the default) for"
                    " scores, torch.exp for log-probabilities."
                )
            average = average.to(group.device) + group.sum(0) / len(self)
            entropy = entropy.to(group.device) + torch.special.entr(group).sum((0, -1)) / len(self)
        return torch.special.entr(average).sum(-1), entropy

    def predictive_quantiles(
        self,
        model: nn.Module,
        x: Inputs,
        quantiles: Sequence[float],
        *,
        noise_std: float,
        forward: Forward | None = None,
    ) -> Tensor:
        r"""Quantiles of the posterior predictive distribution of a regression with Gaussian noise.

        With outputs :math:`\mu_s = f(x;\theta_s)` the predictive distribution is the mixture
        :math:`\frac1S\sum_s N(\mu_s, \sigma^2)`; a quantile solves
        :math:`\frac1S\sum_s \Phi((y-\mu_s)/\sigma) = q`, by bisection between the components' own
        quantiles.

        Args:
            model, x, forward: as in :meth:`predict`. The output is the mean of the target.
            quantiles: probabilities strictly between 0 and 1; ``(0.05, 0.95)`` bounds a 90 %
                interval.
            noise_std: standard deviation σ of the likelihood, in the units of the target. It is the
                one that the training loss states: ``MSELoss`` as −log p per record means variance
                1/2, so ``noise_std=math.sqrt(0.5)``; ``MSELoss() / (2 * s**2)`` means
                ``noise_std=s``.

        Returns:
            ``[len(quantiles), n, ...]`` in the order given.

        Raises:
            RuntimeError, ValueError, TypeError: as :meth:`predict`; a ``ValueError`` too for a
                quantile outside (0, 1) or a noise standard deviation that is not positive and
                finite.

        **Privacy**: post-processing.
        """
        if not quantiles or not all(0 < q < 1 for q in quantiles):
            raise ArgumentError(
                f"quantiles must be probabilities strictly between 0 and 1, got {list(quantiles)}."
            )
        if not (math.isfinite(noise_std) and noise_std > 0):
            raise ArgumentError(
                f"noise_std must be positive and finite, got {noise_std}. It is the standard"
                " deviation of the likelihood: math.sqrt(0.5) for a model trained with MSELoss."
            )

        def solve(groups: Iterator[Tensor]) -> Tensor:
            means = torch.cat(list(groups))
            return _mixture_quantiles(means.double(), quantiles, noise_std).to(means.dtype)

        return torch.cat(self._evaluate(model, x, None, forward, solve), dim=1)

    def _evaluate(
        self,
        model: nn.Module,
        x: Inputs,
        transform: Transform | None,
        forward: Forward | None,
        reduce: Callable[[Iterator[Tensor]], Tensor],
    ) -> list[Tensor]:
        """``reduce`` of the transformed outputs, in groups ``[samples, rows, ...]``, for each
        batch.
        """
        if not self._samples:
            raise StateError(
                f"There is no posterior sample yet: collect() was called {self._num_collected}"
                f" times and burn_in={self.burn_in} of them are discarded. Call collect(model)"
                " after burn-in, before predicting."
            )
        batches = _batches(x)
        parameters = dict(model.named_parameters())
        shapes = self.shapes()
        # A model may be frozen after training; what was frozen during training cannot be trainable
        # now.
        of_model = {
            name: p.shape for name, p in parameters.items() if p.requires_grad or name in shapes
        }
        if of_model != shapes:
            raise SamplesError(
                "The model's trainable parameters are not those of the samples:"
                f" {_difference(shapes, of_model)}. Pass the model that was collected, or one built"
                " and frozen like it."
            )
        device = parameters[next(iter(shapes))].device
        called = _Called(model, _output_of if forward is None else forward)

        def on_model(name: str, sample: Tensor) -> Tensor:
            return sample.to(device=parameters[name].device, dtype=parameters[name].dtype)

        def run(sample: _Sample, batch: Any) -> Tensor:
            output = functional_call(called, {f"model.{n}": p for n, p in sample.items()}, (batch,))
            if not isinstance(output, Tensor):
                raise ArgumentTypeError(
                    f"The model returned a {type(output).__name__}; predictions need one tensor"
                    " with a row a record: pass forward=lambda model, x: model(x).logits, or alike."
                )
            result = output if transform is None else transform(output)
            if (
                not isinstance(result, Tensor)
                or result.dim() == 0
                or result.shape[0] != _records_in(batch)
            ):
                shape = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
                raise SamplesError(
                    f"{_records_in(batch)} records went in and {shape} came out: model and"
                    " transform must return a tensor with one row a record in its first dimension."
                )
            return result

        def groups(batch: Any, size: int) -> Iterator[Tensor]:
            start = 0
            while size > 1 and start < len(self):
                samples = self._samples[start : start + size]
                stacked = {
                    name: torch.stack([on_model(name, s[name]) for s in samples]) for name in shapes
                }
                result = _try_vmap(run, stacked, batch)
                if result is None:
                    break
                yield result
                start += len(samples)
            for sample in self._samples[start:]:
                moved = {name: on_model(name, s) for name, s in sample.items()}
                yield run(moved, batch).unsqueeze(0)

        is_small = sum(s.numel() for s in self._samples[0].values()) <= _LARGEST_IN_GROUP
        with _evaluation_mode(model), torch.no_grad():
            size = _GROUP if is_small else 1
            shown = tqdm(batches, "predicting", delay=_SOON, disable=None, leave=False)
            reduced = [reduce(groups(_moved(batch, device), size)) for batch in shown]
        if not reduced:
            raise SamplesError(
                "x holds no batch: pass a tensor, or a DataLoader that is not empty."
            )
        return reduced

    # -- diagnostics -------------------------------------------------------------------------------

    def to_arviz(self, *other_chains: "PosteriorSamples") -> Any:
        r"""The samples as ArviZ's data structure, for effective sample size, :math:`\hat R`, trace
        pictures and the rest of ArviZ::

            data = first.to_arviz(second, third)
            arviz.summary(data)  # a row a parameter: mean, standard deviation, ESS, R-hat
            arviz.ess(data)            # or one figure alone; arviz.rhat(data)
            arviz.plot_trace(data, var_names=["2.bias"])

        Each parameter is a variable of the group ``posterior`` under its own name, ``[chain, draw,
        ...]``. ArviZ's functions work on every scalar on its own: give ``var_names`` if the network
        is large. :math:`\hat R` (Vehtari et al., 2021, "Rank-normalization, folding, and
        localization: an improved R-hat", section 4) compares chains that were started and run
        independently, and needs at least two. Parameters of a network that only permute its hidden
        units count as different for it; the predictions, :meth:`outputs`, do not.

        Args:
            other_chains: samples of the same parameters from other runs: as many of them, collected
                with the same ``thin``.

        Returns:
            ``arviz.InferenceData``, from ArviZ 1 on ``xarray.DataTree``. On the CPU; half precision
            becomes single.

        Raises:
            ModuleNotFoundError: ArviZ is not installed.
            RuntimeError: a chain has no sample yet.
            TypeError: a chain is not a ``PosteriorSamples``.
            ValueError: the chains have other parameters, lengths or spacings, or one of them is
                there twice; a parameter of the model itself is called ``chain`` or ``draw``.

        **Privacy**: post-processing, no charge. The chains are not free: each is a training run of
        its own that reads the data again, and pays for itself on the accountant
        (``PrivacyEngine(accountant=...)``: one for all of them). Whether to run longer, decided by
        looking at these figures, is an adaptive choice in the sense of
        :class:`~torch_dpbayes.PrivacyAccountant`.
        """
        try:
            import arviz
        except ModuleNotFoundError as error:
            if error.name != "arviz":
                raise
            raise ModuleNotFoundError(
                "to_arviz needs ArviZ, which is not installed: pip install arviz", name="arviz"
            ) from error
        chains = (self, *other_chains)
        for number, chain in enumerate(chains, 1):
            if not isinstance(chain, PosteriorSamples):
                raise ArgumentTypeError(
                    f"chain {number} is a {type(chain).__name__}: pass PosteriorSamples one by one,"
                    " first.to_arviz(second, third)."
                )
            if not len(chain):
                raise StateError(
                    f"Chain {number} holds no sample yet: {chain!r}. Collect after burn-in, before"
                    " the export."
                )
        shapes = self.shapes()
        if taken := shapes.keys() & {"chain", "draw"}:
            raise SamplesError(
                f"A parameter is called {taken.pop()!r}, which ArviZ uses for a dimension and"
                " drops: rename it in the model."
            )
        for number, chain in enumerate(other_chains, 2):
            others = chain.shapes()
            if others != shapes:
                raise SamplesError(
                    f"Chain {number} samples other parameters than the first one:"
                    f" {_difference(shapes, others)}. Chains are compared parameter by parameter:"
                    " pass runs of the same model with the same parameters frozen."
                )
            if (len(chain), chain.thin) != (len(self), self.thin):
                raise SamplesError(
                    f"Chain {number} holds {len(chain)} samples with thin={chain.thin}, the first"
                    f" one {len(self)} with thin={self.thin}: collect all with the same burn_in,"
                    " thin and max_samples, as often."
                )
        posterior = {name: np.stack([chain.draws_of(name) for chain in chains]) for name in shapes}
        for i, j in itertools.combinations(range(len(chains)), 2):
            if all(np.array_equal(of_chain[i], of_chain[j]) for of_chain in posterior.values()):
                raise SamplesError(
                    f"Chains {i + 1} and {j + 1} are the same samples: counted twice, they would"
                    " look converged and worth twice as many draws. Pass runs of their own, each"
                    " with a PosteriorSamples of its own."
                )
        if int(arviz.__version__.split(".")[0]) < 1:
            return arviz.from_dict(posterior=posterior)
        return arviz.from_dict({"posterior": posterior})

    # -- saving ------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the samples to a file of tensors and plain numbers, which
        ``torch.load(weights_only=True)`` can read.

        The file is written beside ``path`` and then moved there: if writing fails, an older file
        stays as it was. Frozen parameters and buffers are not in it; save the model's own
        ``state_dict`` too if it has any.

        Args:
            path: where to write.

        Raises:
            OSError: the file cannot be written.

        **Privacy**: post-processing; the file holds released iterates only.
        """
        content = {
            "format": _FILE_FORMAT,
            "version": _FILE_VERSION,
            "burn_in": self.burn_in,
            "thin": self.thin,
            "max_samples": self.max_samples,
            "num_collected": self._num_collected,
            "samples": self._samples,
        }
        target = Path(os.path.realpath(path))
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        try:
            with open(temporary, "xb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "PosteriorSamples":
        """Reads what :meth:`save` wrote; collecting can go on from there. No code in the file is
        run.

        Args:
            path: the file. Its tensors are read to the CPU; predictions move them to the model's
                device.

        Raises:
            OSError: the file cannot be read.
            ValueError: it was not written by :meth:`save`, is damaged, or is of a later version.

        **Privacy**: none is spent.
        """
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        # the unpickler meets broken bytes with whatever error they lead to
        except Exception as error:
            raise CheckpointError(
                f"{os.fspath(path)} is damaged or was not written by PosteriorSamples.save."
            ) from error
        if not isinstance(content, dict) or content.get("format") != _FILE_FORMAT:
            raise CheckpointError(
                f"{os.fspath(path)} holds something else: it was not written by"
                " PosteriorSamples.save."
            )
        if content["version"] != _FILE_VERSION:
            raise CheckpointError(
                f"{os.fspath(path)} is of format version {content['version']}; this release of"
                f" torch_dpbayes reads version {_FILE_VERSION}. Install a later release."
            )
        loaded = cls(content["burn_in"], content["thin"], content["max_samples"])
        loaded._num_collected = content["num_collected"]
        loaded._samples = content["samples"]
        if loaded._samples:
            loaded._shapes = {name: s.shape for name, s in loaded._samples[0].items()}
        return loaded


class _Called(nn.Module):
    """A model and how it is called, as one module whose parameters can be exchanged."""

    def __init__(self, model: nn.Module, call: Forward) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, batch: Any) -> Tensor:
        return self.call(self.model, batch)


def _batches(x: Inputs) -> Iterable[Any]:
    if isinstance(x, Tensor) and x.dim() > 0:
        return x.split(_ROWS)
    if hasattr(x, "sampler_of_draws"):
        raise ArgumentTypeError(
            "x is a private loader, which draws records at random for one step each: pass"
            " DataLoader(dataset, batch_size=256)."
        )
    if isinstance(x, np.ndarray) or hasattr(x, "to_numpy"):
        raise ArgumentTypeError(
            f"x is a {type(x).__name__}: pass torch.as_tensor(numpy.asarray(x),"
            " dtype=torch.float32), of the model's type"
        )
    if isinstance(x, (Tensor, Mapping)) or not isinstance(x, Iterable):
        raise ArgumentTypeError(_NO_BATCHES)
    return x


def _output_of(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        taken = named_inputs(model, {k: v for k, v in batch.items() if k not in TARGETS})
        if not taken:
            raise ArgumentTypeError(
                f"the model takes none of {', '.join(map(str, batch))} by name: pass"
                ' forward=lambda model, batch: model(batch["..."]).'
            )
        return model(**taken)
    if isinstance(batch, (tuple, list)):
        return model(*(batch[:-1] if len(batch) > 1 else batch))
    return model(batch)


def _moved(batch: Any, device: torch.device) -> Any:
    batch = dict(batch) if isinstance(batch, Mapping) else batch
    if not any(isinstance(t, Tensor) for t in pytree.tree_leaves(batch)):
        raise ArgumentTypeError(_NO_BATCHES)
    return pytree.tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, batch)


def _records_in(batch: Any) -> int:
    tensors = (t for t in pytree.tree_leaves(batch) if isinstance(t, Tensor) and t.dim() > 0)
    return len(next(tensors, ()))


def _try_vmap(
    forward: Callable[[_Sample, Any], Tensor], stacked: _Sample, batch: Any
) -> Tensor | None:
    """The outputs ``[samples, rows, ...]``, or ``None`` where vmap cannot run this model."""
    try:
        with warnings.catch_warnings():
            # vmap runs an operation without a batching rule in a slow loop of its own: ours is
            # faster
            warnings.filterwarnings("error", message="There is a performance drop")
            return vmap(forward, in_dims=(0, None))(stacked, batch)
    # in-place writes, control flow on values, numpy; if the error is real, the loop raises it again
    except Exception:
        return None


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def _mixture_quantiles(means: Tensor, quantiles: Sequence[float], noise_std: float) -> Tensor:
    lowest, highest = means.amin(0), means.amax(0)
    solved = []
    for q in quantiles:
        own = noise_std * torch.special.ndtri(
            torch.tensor(q, dtype=means.dtype, device=means.device)
        )
        low, high = lowest + own, highest + own
        for _ in range(50):  # double precision of any spread below 10⁵ noise standard deviations
            middle = (low + high) / 2
            below = torch.special.ndtr((middle - means) / noise_std).mean(0) < q
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        solved.append((low + high) / 2)
    return torch.stack(solved)


def _array(sample: Tensor) -> "np.ndarray[Any, Any]":
    """On the CPU; numpy has no bfloat16, and sums in half precision would not do for a variance."""
    return np.asarray(sample.to("cpu", torch.promote_types(sample.dtype, torch.float32)))


def _difference(before: dict[str, torch.Size], now: dict[str, torch.Size]) -> str:
    parts = []
    if missing := [name for name in before if name not in now]:
        parts.append(f"missing {', '.join(missing[:3])}")
    if added := [name for name in now if name not in before]:
        parts.append(f"added {', '.join(added[:3])}")
    for name in [name for name in before if name in now and before[name] != now[name]][:3]:
        parts.append(f"{name} was {list(before[name])} and is {list(now[name])}")
    return "; ".join(parts)


def __dir__() -> list[str]:
    return ["PosteriorSamples", "softmax"]
