"""What a checkpoint keeps of a run's releases, and how a run goes on from it."""

from __future__ import annotations

import logging
from typing import Any

from ..errors import CheckpointError
from .release import Release

_log = logging.getLogger("torch_dpbayes")


def save(release: Release) -> dict[str, Any]:
    """The accountant's history, and the streams of noise and sampling if the caller passed
    ``generator=``.
    """
    saved: dict[str, Any] = {
        "accountant": release.accountant.state_dict(),
        "independence": release.independence,
    }
    if release.noise.generator is not None:
        saved["noise"] = release.noise.generator.get_state()
    if release.draws is not None and release.draws.has_user_generator:
        saved["sampler"] = release.draws.position()
    return saved


def resume_charges(release: Release, saved: dict[str, Any]) -> None:
    """See that the accountant holds what the saved run was charged; an empty one takes it over.

    Raises:
        ValueError: it does not, or the saved run's batches would be drawn again.
    """
    if _draws_again(release, saved) and release.draws is not None:
        release.draws.require_position(saved["sampler"])
    charged = saved["accountant"]
    accountant, releases = release.accountant, len(release.accountant)
    speaks = release.ranks is None or release.ranks.rank == 0
    # another rank's state names the job of rank 0, which looks closer and adds the noise
    if speaks or accountant.path is not None or releases < _count(charged):
        accountant.resume(charged)
        if speaks and accountant.path is None and not releases and len(accountant):
            _log.warning(
                "resumed with an accountant in memory: what was released after this state was"
                " saved, or from another copy of it, is not counted. PrivacyAccountant(path=...)"
                " counts all of them."
            )
    if _draws_again(release, saved) and len(accountant) > _count(charged):
        raise CheckpointError(
            "the accountant was charged after this state was saved, and the DataLoader's generator="
            " would draw those batches again, for releases with other noise: leave it out."
        )


def resume_streams(release: Release, saved: dict[str, Any]) -> None:
    """Go on with the saved run's random numbers, where they are the caller's."""
    release.start_afresh()
    if "noise" in saved and release.noise.generator is not None:
        release.noise.generator.set_state(saved["noise"])
    if _draws_again(release, saved) and release.draws is not None:
        release.draws.resume(saved["sampler"])


def _draws_again(release: Release, saved: dict[str, Any]) -> bool:
    return "sampler" in saved and release.draws is not None and release.draws.has_user_generator


def _count(charged: dict[str, Any]) -> int:
    """How many releases a saved accountant held."""
    return sum(int(count) for _, count, *_ in charged["history"])
