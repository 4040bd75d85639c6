"""Audits: measured lower bounds on what a release reveals."""

from .training_run import one_run
from .transcripts import AuditResult, from_scores, repeated

__all__ = ["AuditResult", "from_scores", "one_run", "repeated"]


def __dir__() -> list[str]:
    return sorted(__all__)
