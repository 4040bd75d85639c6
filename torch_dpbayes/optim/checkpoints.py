"""Saves a release in a checkpoint and resumes it: no batch or noise is drawn twice."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError
from ..release import Release


def state_of(release: Release) -> dict[str, Any]:
    """The accountant's history, and the streams of noise and sampling if the caller passed
    ``generator=``.
    """
    saved: dict[str, Any] = {
        "accountant": release.accountant.state_dict(),
        "independence": release.independence,
    }
    if release.noise.generator is not None:
        saved["noise"] = release.noise.generator.get_state()
    if release.draws is not None and release.draws.generator is not None:
        saved["sampler"] = release.draws.position()
    return saved


def resume_charges(release: Release, saved: Mapping[str, Any]) -> None:
    """Check that the accountant contains the saved run's charges; an empty one copies them.

    Raises:
        ValueError: a charge is missing, or the saved run's batches would be drawn again.
    """
    if (draws := _drawn_again(release, saved)) is not None:
        draws.require_position(saved["sampler"])
    accountant, releases = release.accountant, len(release.accountant)
    charged = sum(int(count) for _, count, *_ in saved["accountant"]["history"])
    speaks = release.ranks is None or release.ranks.rank == 0
    # other ranks' states name the job of rank 0: rank 0 compares the jobs, and it adds the noise
    if speaks or accountant.path is not None or releases < charged:
        accountant.resume(saved["accountant"])
        if speaks and accountant.path is None and not releases and len(accountant):
            logging.getLogger("torch_dpbayes").warning(
                "resumed with an accountant in memory: releases after this state was saved, or from"
                " another copy of it, are not counted. PrivacyAccountant(path=...) counts all."
            )
    # later steps of a pass that is paid add no charge by which a filled accountant could tell
    is_paid = draws is not None and saved["sampler"].get("charged_noise") is not None
    if draws is not None and (len(accountant) > charged or (is_paid and releases)):
        later = "may count steps" if is_paid else "was charged"
        raise CheckpointError(
            f"the accountant {later} after this state was saved, and the DataLoader's generator="
            " would draw those batches again, with other noise: leave it out."
        )


def resume_streams(release: Release, saved: Mapping[str, Any]) -> None:
    """Continue the saved run's random streams, if the caller passed their generators."""
    release.start_afresh()
    if "noise" in saved and release.noise.generator is not None:
        release.noise.generator.set_state(saved["noise"])
    if (draws := _drawn_again(release, saved)) is not None:
        draws.resume(saved["sampler"])


def _drawn_again(release: Release, saved: Mapping[str, Any]) -> Any:
    """The draws if they continue from the saved position, else None."""
    is_seeded = release.draws is not None and release.draws.generator is not None
    return release.draws if is_seeded and "sampler" in saved else None
