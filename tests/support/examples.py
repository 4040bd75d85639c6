"""How many examples the default run takes of a test that .ci/run takes in full."""

from typing import Any

from hypothesis import settings


def examples(count: int, **more: Any) -> settings:
    """Settings for ``count`` examples in .ci/run, and in the default run for as large a part of
    them as its profile takes of hypothesis' own number, at least three.
    """
    part = settings().max_examples / settings.get_profile("thorough").max_examples
    return settings(max_examples=max(3, round(count * part)), deadline=None, **more)
