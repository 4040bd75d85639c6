"""The errors of this library: one base class, each error with a stable code.

Each is also a subclass of a Python error, so ``except ValueError`` works.
"""

from __future__ import annotations

import re
from collections import abc
from contextlib import contextmanager

_ARRAYS = re.compile(r"(?s)(?<![\w.])(tensor|array)\(.*?(?:\)|\Z)")
PAGE = "docs/troubleshooting.md"


class DPBayesError(Exception):
    """An error that this library raises, with a code that stays the same between versions.

    Args:
        message: what is wrong, and what to write instead.
        code: the name of the error, a heading in ``docs/troubleshooting.md``. Default: the code of
            the class.

    Attributes:
        code: the name of the error.
    """

    code: str

    def __init__(self, message: str, *, code: str | None = None) -> None:
        # the message may quote a tensor of records that was passed as the wrong argument
        super().__init__(_ARRAYS.sub(r"\1", message))
        self.code = code or type(self).code
        self.add_note(f"why: {PAGE}#{self.code}")

    def __reduce__(self) -> tuple[object, ...]:
        return _made_again, (type(self), str(self), self.code)


class ArgumentError(DPBayesError, ValueError):
    """An argument is missing or has an impossible value."""

    code = "argument"


class ArgumentTypeError(DPBayesError, TypeError):
    """An argument has a wrong type or an unknown name."""

    code = "argument-type"


class StateError(DPBayesError, RuntimeError):
    """The call comes too early or too late."""

    code = "state"


class DivergedError(DPBayesError, FloatingPointError):
    """Parameters would not be finite. They are unchanged; the charge stays."""

    code = "diverged"


class CheckpointError(ArgumentError):
    """The saved state is damaged, or belongs to another run, model or data set."""

    code = "checkpoint"


@contextmanager
def reading_state() -> abc.Iterator[None]:
    """Turn errors inside this block into the error for an incomplete saved state."""
    try:
        yield
    except DPBayesError:
        raise
    except Exception as error:
        raise CheckpointError("the state is damaged: load what state_dict() returned") from error


class AuditError(ArgumentError):
    """The audit cannot run with these arguments, or its bound would be meaningless."""

    code = "audit"


class SamplesError(ArgumentError):
    """The samples, the model and the inputs do not fit together."""

    code = "samples"


class CertificateError(ArgumentError):
    """The certificate does not hold for this model or this ε."""

    code = "certificate"


class UnfitModel(ArgumentError):
    """Clipping each record gives no guarantee for this Pyro model or its data."""

    code = "pyro-model"


class RankError(StateError):
    """Another rank failed or differs from this one. No rank took the step."""

    code = "ranks"


class OwnerError(StateError):
    """Another owner failed, or its program differs. Charges stay."""

    code = "owners"


class ModelError(DPBayesError, ValueError):
    """The model has no per-sample gradients that clipping can bound."""


class LossError(DPBayesError, RuntimeError):
    """The loss, or an operation on the batch, may mix records."""


class StepError(DPBayesError, RuntimeError):
    """The gradients of a step do not belong to the loader's batch."""


def _made_again(kind: type[DPBayesError], message: str, code: str) -> DPBayesError:
    return kind(message, code=code)
