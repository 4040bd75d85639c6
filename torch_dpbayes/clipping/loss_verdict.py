"""Is the gradient that reached a record's output that of its own loss; and if not, why?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .loss_numbers import is_whole
from .loss_program import NotReplayed, Op, Outside, Program, Ref, flat
from .loss_replay import NotAlone, Replay

_OF_SEVERAL = frozenset(("topk", "kthvalue", "batch_norm"))  # which may fail on one record
# Of a gradient's largest entry; noise that cancellation leaves comes on top.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}

_OF_SHAPES = frozenset(
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty"
    " new_tensor".split()
)
# linear in all of their arguments, or in the first one
_SUMS = frozenset("add radd iadd sub rsub isub subtract stack cat concat concatenate".split())
_LINEAR = frozenset(
    "neg negative positive sum mean view view_as reshape reshape_as flatten ravel unflatten squeeze"
    " unsqueeze expand expand_as broadcast_to repeat tile permute transpose t T mT movedim swapaxes"
    " getitem select narrow index_select gather take split chunk unbind diagonal trace flip roll"
    " cumsum clone detach data contiguous alias to type type_as float double half bfloat16 cpu cuda"
    " requires_grad item masked_fill".split()
)
_PRODUCTS = frozenset(
    "mul rmul imul multiply matmul rmatmul mm mv bmm dot inner einsum linear tensordot".split()
)
_QUOTIENTS = frozenset("div truediv itruediv divide true_divide".split())


@dataclasses.dataclass
class Verdict:
    is_same: bool | None
    record: int = 0
    ratio: float | None = (
        None  # of the gradient that arrived to the record's own, where that is one number
    )
    failed: Op | None = None
    widened: Sequence[Op] = ()  # where any dimension of n entries was taken for that of records


def verdict_on(
    program: Program,
    needed: Sequence[Op],
    records: Sequence[int],
    unit: int,
    numbers: Mapping[tuple[int, int], float],
    is_wide: bool,
) -> Verdict:
    """Is the gradient that arrived at the records' outputs, times ``unit``, their own?"""
    compared: list[tuple[int, Tensor, Tensor]] = []
    noise, missing = 0.0, []
    for i in records:
        arrived = [program.arrived[k] for k in range(len(program.values))]
        pieces = [
            torch.zeros_like(value[i : i + 1]) if g is None else g[i : i + 1]
            for g, (value, _) in zip(arrived, program.values, strict=True)
        ]
        came = torch.cat([p.detach().double().flatten() for p in pieces]) * unit
        exact, rough = (
            Replay(program, needed, i, numbers, is_double=d, is_wide=is_wide) for d in (True, False)
        )
        try:
            own, coarse = (
                torch.cat([g.double().flatten() for g in r.gradient()]) for r in (exact, rough)
            )
        except NotAlone as failure:
            pairs = _compares_pairs(exact) or failure.op.name in _OF_SEVERAL
            return Verdict(False if pairs else None, i, None, failure.op)
        if not bool(torch.isfinite(came).all()):
            if bool(torch.isfinite(torch.cat([own, coarse])).all()):
                return Verdict(False, i)  # another record made it so
        elif bool(torch.isfinite(own).all()):
            compared.append((i, came, own))
            difference = (coarse - own).abs().nan_to_num(0.0, 0.0, 0.0).max()
            noise = max(noise, float(difference))
        elif exact.is_partial:
            return Verdict(None)
        elif bool((came != 0).any()) and all(
            bool(torch.isfinite(v[i].double()).all()) for v, _ in program.values
        ):
            missing.append(i)
    if not compared:
        return (
            Verdict(False, missing[0])
            if len(missing) > 1 and len(missing) == len(records)
            else Verdict(None)
        )
    lowest = max(program.dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    finfo = torch.finfo(lowest)
    tolerance = _TOLERANCE.get(lowest, 0.5)
    wrong, ratios = [], []
    for i, came, own in compared:
        largest = float(own.abs().max())
        limit = tolerance * largest + 16 * noise + 4 * unit * finfo.tiny * finfo.eps
        if float((came - own).abs().max()) > limit:
            wrong.append(i)
        if largest > limit:
            at = own.abs().argmax()
            ratio = float(came[at] / own[at])
            ratios.append(
                ratio
                if float((came - ratio * own).abs().max()) <= limit * max(1.0, abs(ratio))
                else math.nan
            )
    if not wrong:
        bent = _bent(program, needed, exact)
        if bent is None:
            return Verdict(True)
        return Verdict(False, compared[-1][0], None, bent, exact.widened)
    is_common = bool(ratios) and all(
        math.isclose(ratio, ratios[0], rel_tol=1e-3) for ratio in ratios
    )
    return Verdict(False, wrong[0], ratios[0] if is_common else None, widened=exact.widened)


def _compares_pairs(replay: Replay) -> bool:
    """Has something as many rows as columns, one for each record?"""
    return any(len(replay.rows_of(index)) > 1 for index in replay.values)


def _bent(program: Program, needed: Sequence[Op], replay: Replay) -> Op | None:
    """An operation that is not linear in what was added up over records before (``clamp``,
    ``nan_to_num``, ``abs`` of a mean loss). Whatever it did in this batch, one record can make it
    change the gradients of all.
    """
    leading = program.leading()
    leads = {id(op) for place, op in enumerate(program.ops) if place in leading}
    of_shapes: set[int] = set()
    added_up: set[int] = set()
    for op in needed:
        made = {ref.index for ref in flat(op.result, Ref)}
        refs = set(op.refs) - of_shapes
        if op.name in _OF_SHAPES or not refs:
            of_shapes |= made
        elif refs & added_up:
            if id(op) in leads and not _is_linear(op, refs, added_up):
                return op
            added_up |= made
        elif any(map(replay.rows_of, refs)) and not any(map(replay.rows_of, made)):
            added_up |= made
    return None


def _is_linear(op: Op, refs: set[int], added_up: set[int]) -> bool:
    """Whether an operation on ``refs`` is linear in those ``added_up``."""
    name = op.name.strip("_")
    if name in _SUMS:
        return True
    if name in _PRODUCTS:
        return len(refs) == 1 and op.refs.count(*refs) == 1
    elsewhere = {ref.index for ref in flat((op.args[1:], op.kwargs), Ref)}
    if name == "where":  # which of the two is taken must not depend on them
        return not {ref.index for ref in flat(op.args[:1], Ref)} & added_up
    return name in (_LINEAR | _QUOTIENTS) and not elsewhere & refs


def explained(program: Program, needed: Sequence[Op], verdict: Verdict, reduction: str) -> str:
    if not _explains_gradient(program, needed):
        return (
            "the gradient was changed on its way from the loss to the model's output: take "
            "tensor hooks (register_hook) off the output and off what is computed from it."
        )
    end = f".{reduction}()"
    for op in needed:
        if (
            op.name in ("cross_entropy", "nll_loss")
            and op.kwargs.get("reduction", "mean") == "mean"
        ):
            call = f"F.{op.name}(out, y"
            if (op.kwargs.get("weight") if len(op.args) < 3 else op.args[2]) is not None:
                return (
                    f"{op.name}(weight=) divides by the weights of the whole batch, "
                    "so records move each other's gradients. "
                    f'Write {call}, weight=weight, reduction="none"){end}.'
                )
            ignored = op.kwargs.get("ignore_index", -100)
            target = op.args[1] if len(op.args) > 1 else op.kwargs.get("target")
            if (
                isinstance(target, Outside)
                and not target.tensor.is_floating_point()
                and bool((target.tensor == ignored).any())
            ):
                return (
                    f"{op.name} divides by the number of targets in the batch "
                    f"that are not ignore_index={ignored}. "
                    f'Write {call}, ignore_index={ignored}, reduction="none"){end}.'
                )
    ratio, n = verdict.ratio, program.n
    for op in needed:
        if (
            op.name.strip("_") in ("div", "divide", "truediv", "true_divide", "itruediv")
            and len(op.args) > 1
        ):
            divisor = op.args[1]
            if isinstance(divisor, Outside) and divisor.tensor.numel() == 1 and ratio is not None:
                return (
                    "the loss divides by a count or sum over the whole batch, as a masked mean"
                    " does. Divide within each record: ((losses * mask).sum(1) /"
                    f" mask.sum(1)){end}, or (losses * mask){end} for one number each."
                )
            if (
                isinstance(divisor, (int, float))
                and ratio is not None
                and not is_whole(divisor / n)
            ):
                return (
                    f"the loss divides by {divisor:g}, and this batch has another number of "
                    "records. Write "
                    f'losses.mean() with reduction="none" losses, or divide by len(out).'
                )
    if ratio is not None and math.isclose(ratio, n, rel_tol=1e-3) and reduction == "mean":
        return (
            'the loss is a sum over records, and loss_reduction is "mean". Write losses.mean(), or '
            'pass loss_reduction="sum" to make_private.'
        )
    if ratio is not None and math.isclose(ratio * n, 1.0, rel_tol=1e-3) and reduction == "sum":
        return (
            'the loss is a mean over records, and loss_reduction is "sum". Write losses.sum(), or '
            'pass loss_reduction="mean" to make_private.'
        )
    where = verdict.failed or _first_mixing(program, needed, verdict.record)
    name = f" ({where.name.strip('_')})" if where is not None else ""
    return (
        f"the loss mixes records{name}: one record's gradient depends on the others in the batch. "
        f"Compute a loss of each record from its own row, and end with losses{end}."
    )


def _explains_gradient(program: Program, needed: Sequence[Op]) -> bool:
    """Does what was noted, run again for the whole batch, give the gradient that arrived?"""
    found = Replay(program, needed, None, {}, is_double=False).gradient()
    for k, g in enumerate(found):
        arrived = program.arrived[k]
        if arrived is None:
            continue
        finite = torch.isfinite(arrived) & torch.isfinite(g)
        a, b = torch.where(finite, arrived, 0).double(), torch.where(finite, g, 0).double()
        if float((a - b).abs().max()) > 1e-2 * float(a.abs().max().maximum(b.abs().max())):
            return False
    return True


def _first_mixing(program: Program, needed: Sequence[Op], record: int) -> Op | None:
    """The operation after which a record's row is no longer what it is alone."""
    whole = Replay(program, needed, None, {}, is_double=True)
    alone = Replay(program, needed, record, {}, is_double=True)
    try:
        whole.gradient()
        alone.gradient()
    except (NotAlone, NotReplayed, RuntimeError):
        return None
    maker = {ref.index: op for op in needed for ref in flat(op.result, Ref)}
    for op in needed:
        for ref in flat(op.result, Ref):
            for dim, owners in alone.rows_of(ref.index).items():
                own = whole.values[ref.index].index_select(
                    dim, (owners == record).nonzero().flatten()
                )
                if own.shape == alone.values[ref.index].shape and not torch.allclose(
                    own.double(), alone.values[ref.index].double(), rtol=1e-6, equal_nan=True
                ):
                    reduced = [i for i in op.refs if not alone.rows_of(i) and i in maker]
                    return maker[reduced[0]] if reduced else op
    return None
