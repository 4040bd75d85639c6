# ruff: noqa: SLF001 - this module is a part of the class Followed
"""The loss of a training loop, computed for each record alone.

An operation on followed tensors runs by ``torch.func.vmap`` for each record as a batch of one, so
that the result of record i is made of record i. The end is a mean or sum over the records, and
``backward()``. For speed, elementwise and classification losses run on all rows at once: a short
list (:mod:`torch_dpbayes.per_sample.plain_functions`) of functions that torch documents as such.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from ..errors import DPBayesError, LossError
from ..noise import PrivateRandomness
from . import function_kinds as kinds
from .derived import derived, holds_records, is_private
from .followed import PRIME, Batch, Followed, flatten, is_constant, unflatten
from .nested import map_tensors, two_rows
from .plain_functions import gaussian_nll, is_row_by_row, losses_at_once
from .record_map import (
    SELECTS,
    CannotBeMapped,
    RecordMap,
    as_traced,
    in_plain_words,
    require_no_modes,
    without_values,
)


class Delivery:
    """Hands out batches as followed tensors, one open batch at a time.

    Args:
        expected_batch_size: what followed tensors show as the number of their records.
        randomness: random numbers for draws inside the loss.
    """

    def __init__(
        self, expected_batch_size: float, randomness: PrivateRandomness | None = None
    ) -> None:
        self._shown = max(2, round(expected_batch_size))
        self._randomness = randomness or PrivateRandomness()
        self.batch: Batch | None = None  # delivered last

    def __call__(self, delivered: Any, records: int) -> Any:
        """``delivered`` with its tensors followed, of so many records in dimension 0."""
        if self.batch is not None:
            self.batch.close()
        self.batch = batch = Batch(self._shown, _run, self._randomness, max(0, 2 - records))

        def followed(t: Tensor) -> Tensor:
            if t.shape[:1] != (records,):
                return derived(t)  # collate_fn made it from several records
            if holds_records(t):
                raise LossError(
                    "the loader delivers values of an earlier batch (kept by the data set or"
                    " collate_fn), so this step would use other records. Return each record as it"
                    " is stored",
                    code="loss-mixes",
                )
            return Followed((two_rows(t) if batch.spare else t).unsqueeze(1), batch)

        return map_tensors(delivered, followed)


def _run(function: Any, name: str, *given: Any) -> Any:
    """A torch function on followed tensors of an open batch."""
    operation = _Operation(function, name, *given)
    try:
        if name == "backward" or name in kinds.METADATA:
            return operation.run()
        with as_traced():
            if name in kinds.DRAW_NOTHING:
                return operation.run()
            rows = [f._rows for f in operation.followed if not f._rows.is_meta]  # not sealed
            with operation.batch.randomness({r.device for r in rows}, rows):
                return operation.run()
    except CannotBeMapped as error:
        what = str(error).rstrip(".")
    except DPBayesError:
        raise
    except Exception as error:
        if name == "backward":
            raise
        what = without_values(error)
    raise operation.batch.refuse(f"{name}: {what}", remedy=operation.remedy())


_run_backward: Any = Variable._execution_engine.run_backward
_STATISTICS = "Put a network that is not private in eval mode, and run update_bn on public records"
_OF_MASKS = (
    "Write (losses * mask).mean(); for boxes loss=fn that returns 1 -"
    " torchvision.ops.generalized_box_iou(output, target)"
)
_OF_INPUTS = "Compute the gradient inside the model or loss= by torch.func.grad"


class _Operation:
    """One torch function on followed tensors of an open batch."""

    def __init__(
        self,
        function: Any,
        name: str,
        args: Any,
        kwargs: dict[str, Any],
        leaves: list[Any],
        spec: Any,
        batch: Batch,
    ) -> None:
        self.function, self.name, self.args, self.kwargs = function, name, args, kwargs
        self.leaves, self.spec, self.batch = leaves, spec, batch
        self.followed: list[Followed] = []
        self.others: list[Tensor] = []
        self.has_reduced = self.has_earlier = False  # among the followed ones
        for v in leaves:
            if isinstance(v, Followed):
                self.followed.append(v)
                self.has_reduced |= v._how is not None
                self.has_earlier |= v._batch is not batch
            elif isinstance(v, Tensor):
                self.others.append(v)

    def run(self) -> Any:
        name, first, batch = self.name, self.followed[0], self.batch
        if not kinds.is_torchs(self.function):
            raise batch.refuse(f"{name} is not a function of torch")
        if name in kinds.METADATA:
            return self.function(*self.args, **self.kwargs)
        if batch.refusal is not None:
            raise batch.refuse(batch.refusal)
        is_metric = bool(self.has_earlier or self.others) and self._is_running_metric()
        if self.has_earlier and not is_metric:
            raise batch.refuse("tensors of two batches are combined: one is of an earlier step")
        for f in self.followed:
            if f.grad_fn is not None:
                raise batch.refuse("a torch.autograd.Function was applied to the outputs")
        require_no_modes()
        if name in kinds.SPECIAL:
            return self._special()
        if kinds.is_in_place(name, self.kwargs):
            raise batch.refuse(f"{name} changes a tensor in place", "loss-in-place")
        if name == "batch_norm" and self.kwargs.get("training"):
            raise batch.refuse("batch_norm takes statistics of the batch", remedy=_STATISTICS)
        if is_metric:  # plain values of earlier batches, or a running mean would keep them all
            for k, v in enumerate(self.leaves):
                if isinstance(v, Followed) and v._batch is not batch:
                    self.leaves[k] = v.free()
            self.followed = [f for f in self.followed if f._batch is batch]
            return self._sealed()
        for value in self.others:
            self._check_constant(value)
        is_only = len(self.followed) == 1 and self._is_first(first)
        if name in kinds.TO_ELSEWHERE and is_only and first._how != "sealed":
            # memory_format does not fit rows, which have one dimension more
            options = {k: v for k, v in self.kwargs.items() if k != "memory_format"}
            return first.like(self.function(first._rows, *self.args[1:], **options))
        if self.has_reduced:
            return self._on_reduced()
        if name in kinds.LOSSES and ("reduction" in self.kwargs or name == "gaussian_nll_loss"):
            return self._loss()
        is_alone = len(self.args) == 1 and not self.kwargs
        if name in ("mean", "sum") and is_alone and first._rows.is_floating_point():
            return self._reduced(first._rows, name)
        if name == "squeeze" and (is_alone or self.args[1:] == (-1,)):
            dims = range(first.dim())[0 if is_alone else -1 :]
            keep = [d for d in dims if d != first._dim and first.shape[d] == 1]
            dim = None if first._dim is None else first._dim - sum(d < first._dim for d in keep)
            return Followed(first._rows.squeeze([d + 1 for d in keep]), batch, dim)
        return self._mapped()

    def _special(self) -> Any:
        """Functions that do not compute with the values."""
        name, first, batch = self.name, self.followed[0], self.batch
        if name == "grad" and not isinstance(self.function, FunctionType):
            return None
        if name == "_is_all_true":  # torch.distributions would raise an error otherwise
            return torch.tensor(True)
        if self.function is torch.autograd.backward:
            if len(self.followed) != 1 or self.others:
                raise batch.refuse("torch.autograd.backward() of several tensors")
            return self._backward()
        if name == "backward":
            return self._backward(*self.args[1:], **self.kwargs)
        if name in ("__repr__", "__str__"):
            return f"Followed(shape={tuple(first.shape)}, values after backward())"
        if name in kinds.NUMBERS:
            raise batch.refuse(
                f"{name} reads values of the batch before backward(), so the loss could depend on"
                " them",
                "loss-number",
            )
        raise batch.refuse(f"tensors of the batch have no {name}", "loss-backward", _OF_INPUTS)

    def _called(self, values: Iterable[Tensor]) -> Any:
        """The function with tensors in place of the followed ones."""
        rest = iter(values)
        leaves = [next(rest) if isinstance(v, Followed) else v for v in self.leaves]
        args, kwargs = unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)

    def _is_running_metric(self) -> bool:
        """Whether reduced values without gradients are combined with values of earlier batches, as
        in a running mean. The result is sealed, so that no loss and no model can use it.
        """
        if not self.has_earlier and not any(map(holds_records, self.others)):
            return False
        return (
            not any(f._batch.is_open for f in self.followed if f._batch is not self.batch)
            and not any(v.requires_grad for v in self.others)
            and all(
                f._how is not None and not f._rows.requires_grad
                for f in self.followed
                if f._batch is self.batch
            )
        )

    def _check_constant(self, value: Tensor) -> None:
        if is_private(value):  # also what torch reads as a number: huber_loss(delta=t)
            raise self.batch.refuse(
                f"{self.name} gets a tensor computed from several records or another batch"
            )
        if value.requires_grad and torch.is_grad_enabled():
            raise self.batch.refuse(
                f"{self.name} gets a tensor outside the model that requires grad", "loss-outside"
            )

    def remedy(self) -> str | None:
        """For outputs ``[B, 1]`` and targets ``[B]``, which torch would broadcast to ``[B, B]``."""
        shapes = sorted((tuple(f.shape) for f in self.followed), key=len)
        if len(shapes) == 2 and shapes[1] == (*shapes[0], 1):
            return "Give both the same shape: write .squeeze(-1) after the one with more dimensions"
        return None

    def _is_first(self, value: Followed) -> bool:
        return len(self.args) > 0 and self.args[0] is value  # all may be passed by name

    def _is_detached(self) -> bool:
        return not torch.is_grad_enabled() or not any(f._rows.requires_grad for f in self.followed)

    # -- losses of torch.nn.functional -------------------------------------------------------------

    def _loss(self) -> Any:
        """A loss whose mean has a divisor that depends only on shapes."""
        batch, name = self.batch, self.name
        kwargs = dict(self.kwargs)
        how = kwargs.pop("reduction", "mean")
        if kwargs.get("size_average") is not None or kwargs.get("reduce") is not None:
            raise batch.refuse(f"{name}: size_average and reduce are deprecated", "loss-option")
        if name == "cross_entropy" and self.followed[0].shape[1:2] == (1,):
            raise batch.refuse(
                "cross_entropy of one column is always 0",
                "loss-constant",
                "For one logit write F.binary_cross_entropy_with_logits(out.squeeze(-1), y)",
            )
        if name == "ctc_loss":
            raise batch.refuse("ctc_loss takes records in dimension 1, and reads their lengths")
        if how == "mean" and name in kinds.WEIGHTED and kwargs.get("weight") is not None:
            raise batch.refuse(
                f"{name} divides by the weights of the records in the batch",
                "loss-divisor",
                f"Write F.{name}(..., weight=w, reduction='none').mean()",
            )
        self.kwargs = {**kwargs, "reduction": "none"}
        if (whole := self._at_once(kwargs)) is not None:
            rows = whole if how != "none" else whole.view(self.followed[1]._rows.shape)
        else:
            self.leaves, self.spec = flatten((self.args, self.kwargs))
            is_ours = name == "gaussian_nll_loss"
            found = gaussian_nll(*self.args, **self.kwargs) if is_ours else self._mapped()
            if how == "none" or found._how == "sealed":
                return found
            rows = found._rows
        if how == "none":
            return Followed(rows, batch)
        if how == "batchmean":
            return self._reduced(rows.flatten(1).sum(1) / rows.shape[1], "mean")
        return self._reduced(rows, how)

    def _at_once(self, options: dict[str, Any]) -> Tensor | None:
        """The losses of all rows together, or None; needs records in dimension 0."""
        if len(self.followed) != 2 or [*map(id, self.args)] != [*map(id, self.followed)]:
            return None
        options = {name: value for name, value in options.items() if value is not None}
        outputs, labels = self.followed
        rows = outputs._rows, labels._rows
        is_known = is_row_by_row(self.function, rows[0].shape[1:], rows[1].shape[1:], options)
        if not is_known or outputs._dim != 0 or labels._dim != 0:
            return None
        return losses_at_once(self.function, *rows, options)

    def _reduced(self, rows: Tensor, how: str) -> Followed:
        if rows.numel() != rows.shape[0]:  # several numbers per record
            rows = rows.flatten(1).mean(1) if how == "mean" else rows.flatten(1).sum(1)
        elif rows.dim() > 1:
            rows = rows.flatten()
        return Followed(rows, self.batch, None, how)

    # -- any other function ------------------------------------------------------------------------

    def _mapped(self) -> Any:
        """Run the function for each record as a batch of one; the result shows a batch's shape."""
        failure: Exception | None = None
        for many, one in self._variants():
            on_meta, single = list(self.leaves), list(self.leaves)
            for k in many:
                on_meta[k], single[k] = many[k], one[k]
            try:
                shapes, is_same, _ = kinds.shapes_of(self.function, self.spec, on_meta)
                break
            except Exception as error:
                failure = failure or error
        else:
            assert failure is not None
            raise self._refused(failure)
        if not is_same:
            return self._sealed()
        places = [k for k, v in enumerate(single) if isinstance(v, Followed)]
        nesting: Any | None = None

        def of_one(rows: Sequence[Tensor]) -> Sequence[Tensor]:
            nonlocal nesting
            values = list(single)
            for k, row in zip(places, rows, strict=True):
                values[k] = row
            args, kwargs = unflatten(values, self.spec)
            found, nesting = flatten(self.function(*args, **kwargs))
            return found

        rows = [single[k]._rows for k in places]
        try:
            found = RecordMap(len(rows[0]))(of_one, rows)
        except Exception as error:
            if self._is_detached() or isinstance(error, IndexError):  # an index of other records
                return self._sealed()
            raise
        if len(found) != len(shapes):
            raise self.batch.refuse(f"{self.name} returns another number of tensors for one record")
        results = [self._followed(t, m) for t, m in zip(found, shapes, strict=True)]
        if any(t is None for t in results):
            return self._sealed()
        return unflatten(results, nesting)

    def _refused(self, failure: Exception) -> DPBayesError:
        """The error of a function that fails for all variants of its arguments."""
        sizes = [(v.shape, len(v) % self.batch.shown) for v in self.others if v.dim() and len(v)]
        if any(rest == 0 or self.batch.shown in shape for shape, rest in sizes):
            return self.batch.refuse(
                f"{self.name} gets a tensor with one row per record that is not computed from the"
                " batch",
                "loss-rows",
            )
        # with the sizes that the batch shows
        shown = re.sub(
            r"\d+",
            lambda n: str(int(n[0]) // PRIME * self.batch.shown or n[0]),
            in_plain_words(failure).rstrip("."),
        )
        remedy = _OF_MASKS if shown == SELECTS else self.remedy()
        return self.batch.refuse(f"{self.name}: {shown}", remedy=remedy)

    def _followed(self, rows: Any, meta: Tensor | None) -> Followed | None:
        """A result with the dimension of its records; None if it has none, or several."""
        if not isinstance(rows, Tensor) or meta is None or rows.dim() != meta.dim() + 1:
            return None
        own = list(rows.shape[1:])
        dims = [d for d, size in enumerate(meta.shape) if size and size % PRIME == 0]
        if len(dims) == 1:
            as_one = [n // PRIME if d in dims else n for d, n in enumerate(meta.shape)]
            return Followed(rows, self.batch, dims[0]) if as_one == own else None
        if not dims and own == list(meta.shape) and self.name in ("mean", "sum"):
            return Followed(rows, self.batch, None, self.name)
        return None

    def _variants(self) -> Iterator[tuple[dict[int, Any], dict[int, Any]]]:
        """Interpretations of arguments that may depend on the number of records, the most likely
        first: by index, the arguments for a prime number of records, and those for one record.
        """
        shown, device = self.batch.shown, self.followed[0].device
        every = range(shown)
        many: dict[int, Any] = {}
        one: dict[int, Any] = {}
        for k, v in enumerate(self.leaves if self.name == "__getitem__" else ()):
            if isinstance(v, Tensor):
                is_all = type(v) is Tensor and v.dtype == torch.long and v.shape == (shown,)
                is_all = is_all and v.tolist() == [*every]
            else:
                is_all = v == every
            if is_all:  # out[torch.arange(len(out)), y]: each record selects its own row
                many[k] = torch.empty(PRIME, dtype=torch.long, device="meta")
                one[k] = torch.zeros(1, dtype=torch.long, device=device)
        sizes: list[int | None] = [None]
        if self.name in kinds.SIZES:  # a size that is len(x) is the number of records
            places = [k for k, v in enumerate(self.leaves) if type(v) is int]
            may_be = [k for k in places if (v := self.leaves[k]) > 0 and v % shown == 0]
            sizes = [None, *may_be]
            if may_be[:1] == places[:1]:
                sizes[:2] = reversed(sizes[:2])
        # torch.ones(len(x), 3), with the same row for each record
        constants = [k for k, v in enumerate(self.leaves) if is_constant(v, self.batch)]
        for is_constant_used in (False, True)[: 1 + bool(constants)]:
            for k in constants if is_constant_used else ():
                one[k] = row = self.leaves[k][:1]
                many[k] = row.to("meta").expand(PRIME, *row.shape[1:])
            for place in sizes:
                size = {} if place is None else {place: self.leaves[place] // shown}
                yield {**many, **{k: n * PRIME for k, n in size.items()}}, {**one, **size}

    # -- values computed from several records, and functions of reduced losses ---------------------

    def _sealed(
        self, what: str = "mixes the records of the batch", code: str = "loss-mixes"
    ) -> Any:
        """Metrics: without gradients, any function runs on the values after ``backward()``. Before,
        the result has only a shape, which must exist for every number of records.

        Args:
            what, code: of the error if there are gradients.
        """
        batch, reads = self.batch, ("reads values of the batch before backward()", "loss-number")
        if self.has_reduced and any(f._how is None for f in self.followed):  # as in a mixup
            what = "combines values of several records (x[permuted], a mean) with single records"
            code, reads = "loss-mixes", (what, "loss-mixes")
        if not self._is_detached():
            raise batch.refuse(f"{self.name} {what}", code, self.remedy())
        shapes: Sequence[Tensor | None] = [None]
        nesting = None
        with suppress(Exception):
            shapes, _, nesting = kinds.shapes_of(self.function, self.spec, self.leaves)
        found: list[Any] = []

        def result(k: int) -> Any:
            if not found:
                # a tensor that they are written into is marked
                values = [f.free() for f in self.followed]
                found.extend(flatten(self._called(values))[0])
            return found[k]

        sealed = []
        for k, meta in enumerate(shapes):
            if meta is None:
                raise batch.refuse(f"{self.name} {reads[0]}", reads[1])
            value = partial(result, k)
            sealed.append(Followed(meta, batch, None, "sealed", value, self.followed[0].device))
        return unflatten(sealed, nesting)

    def _on_reduced(self) -> Any:
        """Reduced losses: multiples and sums of them are one loss."""
        name, batch, first = self.name, self.batch, self.followed[0]
        how = first._how
        is_one = how in ("mean", "sum") and all(f._how == how for f in self.followed)
        numbers = [v for v in self.leaves if isinstance(v, (int, float))]
        if name in kinds.PRODUCTS:
            is_ratio = "div" in name
            is_fixed = len(self.followed) == 1 and not self.others
            is_fixed = is_fixed and (self._is_first(first) or not is_ratio)
        else:
            is_fixed = all(v.dim() == 0 for v in self.others)  # torch.zeros(()) + loss
        if not (is_one and is_fixed and name in kinds.LINEAR):
            return self._sealed("of a reduced loss", "loss-reduced")
        if name in kinds.SUMS and how == "sum" and any(bool(v) for v in (*numbers, *self.others)):
            return self._sealed("of a number and a sum over records", "loss-reduced")
        if name in kinds.PRODUCTS and numbers:
            each, rest = divmod(numbers[0], batch.shown)  # the number of records, as it is shown
            is_mean = each == 1 or (each > 1 and batch.loss_reduction == "mean")
            if "div" in name and how == "sum" and rest == 0 and is_mean:
                return Followed(first._rows / each, batch, None, "mean")
            if numbers == [batch.shown] and "mul" in name and batch.loss_reduction == "sum":
                return Followed(first._rows, batch, None, "sum")
        rows = [f._rows for f in self.followed]
        (found,) = RecordMap(len(rows[0]))(lambda r: [self._called(r)], rows)
        return Followed(found, batch, None, how)

    def _backward(
        self,
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        batch, loss = self.batch, self.followed[0]
        if gradient is not None or inputs is not None or create_graph or retain_graph:
            raise batch.refuse("backward() has arguments", "loss-backward")
        if loss._how not in ("mean", "sum") or loss.dim() > 0:
            raise batch.refuse(
                "backward() of a tensor that is not one mean or sum over the records", "loss-vector"
            )
        if torch._C._are_functorch_transforms_active():
            raise batch.refuse("backward() is called inside a torch.func transform")
        if torch.is_anomaly_enabled():
            raise batch.refuse(
                "anomaly detection is on: one record's NaN would raise an error",
                "loss-backward",
                "Leave out torch.autograd.set_detect_anomaly",
            )
        if not loss._rows.requires_grad or batch.loss_reduction is None:
            raise batch.refuse(
                "the loss does not depend on the parameters of the private model", "loss-constant"
            )
        if loss._how != batch.loss_reduction:
            raise batch.refuse(
                f"the loss is a {loss._how} over the records, but make_private expects a"
                f" {batch.loss_reduction}",
                "loss-reduction",
                f'Write make_private(..., loss_reduction="{loss._how}"), or reduce by'
                f" .{batch.loss_reduction}()",
            )
        try:
            # gradients of each record's own loss, for the model's leaves only, by the engine
            # itself: torch's checks of shapes take as long as a small backward pass
            leaves = tuple([t for t in batch.leaves if t.requires_grad])  # some were frozen since
            given = (loss._rows,), (torch.ones_like(loss._rows),), False, False, leaves
            _run_backward(*given, allow_unreachable=True, accumulate_grad=True)
        except BaseException:
            batch.refusal = "backward() failed"  # some layers have their gradients, others not
            raise
        finally:
            batch.close()
