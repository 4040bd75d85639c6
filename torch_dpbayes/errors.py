"""The errors of this library: one base class, each error with a stable code.

Each is an error of Python's as well, so that ``except ValueError`` goes on to work.
"""

from __future__ import annotations

PAGE = "docs/troubleshooting.md"


class DPBayesError(Exception):
    """An error that this library raises, with a code that stays the same between versions.

    Args:
        message: what is wrong, and what to write instead.
        code: names the error; ``docs/troubleshooting.md`` explains it under this name. Classes
            have one for what they usually say.

    Attributes:
        code: as given.
    """

    code: str

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code or type(self).code
        self.add_note(f"why: {PAGE}#{self.code}")

    def __reduce__(self) -> tuple[object, ...]:
        return _made_again, (type(self), str(self), self.code)


class ArgumentError(DPBayesError, ValueError):
    """An argument has a value that it cannot have, or is missing."""

    code = "argument"


class ArgumentTypeError(DPBayesError, TypeError):
    """An argument is of another type, or has another name, than the function takes."""

    code = "argument-type"


class StateError(DPBayesError, RuntimeError):
    """The call comes at the wrong time: something else has to be done before it, or nothing."""

    code = "state"


class DivergedError(DPBayesError, FloatingPointError):
    """Parameters went beyond their dtype. They are as before; what was charged stays charged."""

    code = "diverged"


class CheckpointError(ArgumentError):
    """What was saved is damaged, or of another run, model or data set."""

    code = "checkpoint"


class AuditError(ArgumentError):
    """With these arguments the audit cannot run, or its bound would mean nothing."""

    code = "audit"


class SamplesError(ArgumentError):
    """The samples, the model and the inputs do not fit together."""

    code = "samples"


class CertificateError(ArgumentError):
    """The certificate says nothing about this model, or this ε."""

    code = "certificate"


class UnfitModel(ArgumentError):
    """A Pyro model, or its data, to which record-wise clipping gives no guarantee."""

    code = "pyro-model"


class RankError(StateError):
    """Another rank failed, or does something else than this one. No rank took the step."""

    code = "ranks"


class OwnerError(StateError):
    """Another owner failed, or its program differs. What was charged stays charged."""

    code = "owners"


class ModelError(DPBayesError, ValueError):
    """The model has no per-sample gradients, or none that clipping bounds."""


class LossError(DPBayesError, RuntimeError):
    """The loss, or what the loop makes of a batch, may depend on several records at once."""


class StepError(DPBayesError, RuntimeError):
    """The gradients of a step are not those of the batch that the loader delivered."""


def _made_again(kind: type[DPBayesError], message: str, code: str) -> DPBayesError:
    return kind(message, code=code)
