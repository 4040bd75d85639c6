"""How many examples hypothesis takes of a test that states their number itself."""

from typing import Any

from hypothesis import settings

OF_THE_THOROUGH_PROFILE = settings.get_profile("thorough").max_examples


def examples(count: int, **more: Any) -> settings:
    """Settings for ``count`` examples in .ci/run, and in the default run for as large a part of
    them as its profile takes of hypothesis' own number, at least three.
    """
    part = settings().max_examples / OF_THE_THOROUGH_PROFILE
    return settings(max_examples=max(3, round(count * part)), deadline=None, **more)
