"""How many cases the default run takes of tests that .ci/run takes in full."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

THOROUGH = [pytest.mark.thorough]


def examples(count: int, **more: Any) -> settings:
    """Settings for ``count`` examples in .ci/run, and in the default run for as large a part of
    them as its profile takes of hypothesis' own number, at least three.
    """
    part = settings().max_examples / settings.get_profile("thorough").max_examples
    return settings(max_examples=max(3, round(count * part)), deadline=None, **more)


def few_of(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """All cases for .ci/run, of which the default run takes those that are named."""
    return [
        pytest.param(*(c if isinstance(c, tuple) else (c,)), marks=[] if c in kept else THOROUGH)
        for c in cases
    ]
