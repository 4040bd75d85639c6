"""Audits: what a release reveals at least, measured."""

from .result import AuditResult
from .training_run import one_run

__all__ = ["AuditResult", "one_run"]


def __dir__() -> list[str]:
    return sorted(__all__)
