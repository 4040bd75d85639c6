"""What a check finds out, told apart from what a model itself raises."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

# what a record's output or gradient must not depend on
OF_OTHERS = "another record in the batch"
OF_NUMBER = "the number of records in the batch, or on its place among them"

_SECONDS = 0.4  # of processor time, for the trials of a check that come after the first

_HOOKED = "Output 0 of BackwardHookFunction"  # of torch's text, 75 words, where hooks are attached
_IN_PLACE = (
    "an activation or x += y changes what Opacus' hooks see: write inplace=False, x = x + y, or"
    " leave out grad_sample_mode="
)

_Trial = TypeVar("_Trial")


class MixedRecordsError(ValueError):
    """What a check found out, and not what the model itself raised."""


class MissingGradientsError(MixedRecordsError):
    """A parameter has no gradient of each record."""


@contextmanager
def failing_as(message: str) -> Iterator[None]:
    """Where the model fails inside, raise a ``ValueError`` of ``message`` with its error."""
    try:
        yield
    except MixedRecordsError:
        raise
    except Exception as error:
        is_in_place = _HOOKED in str(error)
        raise ValueError(message.format(_IN_PLACE if is_in_place else error)) from error


class MayFail(AbstractContextManager["MayFail"]):
    """The model may refuse what it is given inside; what a check finds is raised.

    Attributes:
        failed: whether it did.
    """

    failed = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> bool:
        self.failed = error is not None
        return isinstance(error, Exception) and not isinstance(error, MixedRecordsError)


def affordable(
    trials: Iterable[_Trial],
    always: int,
    cost: Callable[[_Trial], float] = lambda _: 1.0,
) -> Iterator[_Trial]:
    """The first ``always`` of the trials, and those that so many seconds more of this thread are
    enough for.
    """
    start, spent, required = time.thread_time(), 0.0, 0.0
    for k, trial in enumerate(trials):
        so_far = time.thread_time() - start
        if k <= always:
            required = so_far
        if k >= always and so_far * (1 + cost(trial) / spent) > _SECONDS + required:
            continue
        spent += cost(trial)
        yield trial
