"""How near discretised Langevin dynamics comes to its target in Rényi divergence, and what the
certificates make of that (Ganesh, Talwar 2020).

    reproduce_renyi_langevin.py --quick       # coarse grids, half a minute
    reproduce_renyi_langevin.py               # fine ones, for docs/reproductions

Their theorems bound the divergence, in both directions, of the overdamped and the underdamped chain
from a strongly log-concave target, with constants that they do not state. If the target is
Gaussian, so is every state, and everything can be computed: the divergence after every number of
steps, its floor (the stationary bias of a step size), and the privacy of the last state, to compare
with what the library certifies.

The model is the library's: a ``GLM("gaussian")`` with 10 weights, prior precisions 1 to 10,
gradients clipped to 1/4, and 100 records, all of them so far outside that their clipped gradients
are constant. The posterior is then N(m, diag(1/precision)). Only m depends on the records; it is up
to 25 posterior standard deviations away from the start. Replacing a record moves the gradient by
1/2 at most, and an exact draw is 1/2-Gaussian differentially private.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from reproduction import Panel, Row, columns, digest, finish, grouped, having, one_of, parser_of
from scipy.linalg import expm

from torch_dpbayes import PrivacyAccountant, ops
from torch_dpbayes.accounting.events import MuGaussianDpEvent
from torch_dpbayes.ops.certificates import Setting

Array = NDArray[np.float64]

STRENGTH, LARGEST = 1.0, 10.0  # least and largest precision of the target
DIMENSION = 10
NUM_DATA, CLIP, NOISE_STD = 100, 0.25, 10.0
FAR = 1e6  # targets at which every gradient is at its clip
# of U over all data sets, as the certificate has to take it
SMOOTHNESS = LARGEST + NUM_DATA / NOISE_STD**2
INVERSE_MASS = 1 / LARGEST
FRICTION = 2.0
DELTA = 1e-5
# for RenyiClose, of which the best is taken
ORDERS = tuple(float(order) for order in np.geomspace(1.5, 30_000, 60))
NEVER = 10**9
SAMPLERS = ("overdamped", "underdamped")
PRECISIONS = np.geomspace(STRENGTH, LARGEST, DIMENSION)


# -- laws ------------------------------------------------------------------------------------------


class Law(NamedTuple):
    """The chain's last position, a Gaussian with independent coordinates, beside its target
    N(m, 1/precision).
    """

    excess: Array
    """variance · precision − 1."""
    forgotten: Array
    """Share of the distance from start to m that is still to go: the mean is m·(1 − forgotten)."""


def law(sampler: str, step_size: float, steps: int | None, precision: Array) -> Law:
    """After ``steps``; None: in the end."""
    if sampler == "overdamped":
        contraction = 1 - step_size * precision
        gone = np.zeros_like(precision) if steps is None else contraction**steps
        return Law((step_size * precision / 2 - gone**2) / (1 - step_size * precision / 2), gone)
    move, noise = underdamped_step(step_size, precision, FRICTION)
    # in the end S = move S moveᵀ + noise
    grown = np.einsum("nij,nkl->nikjl", move, move).reshape(-1, 4, 4)
    end = np.linalg.solve(np.eye(4) - grown, noise.reshape(4, 1)).reshape(-1, 2, 2)
    if steps is None:
        return Law(end[:, 0, 0] * precision - 1, np.zeros_like(precision))
    power = np.linalg.matrix_power(move, steps)
    start = np.diag([0.0, INVERSE_MASS])
    covariance = end + power @ (start - end) @ np.swapaxes(power, 1, 2)
    return Law(covariance[:, 0, 0] * precision - 1, power[:, 0, 0])


def underdamped_step(step_size: float, precision: Array, friction: float) -> tuple[Array, Array]:
    """Linear map (n, 2, 2) of (position − m, velocity) by one step, and the covariance (2, 2)
    of its noise: matrix exponentials (Van Loan 1978).
    """
    flow = np.array([[0.0, 1.0], [0.0, -friction]])
    force = np.array([[0.0], [-INVERSE_MASS]])
    both = expm(step_size * np.block([[flow, force], [np.zeros((1, 3))]]))
    move = both[:2, :2] + precision[:, None, None] * (both[:2, 2:] @ np.array([[1.0, 0.0]]))
    diffusion = np.diag([0.0, 2 * friction * INVERSE_MASS])
    blocks = expm(step_size * np.block([[-flow, diffusion], [np.zeros((2, 2)), flow.T]]))
    return move, blocks[2:, 2:].T @ blocks[:2, 2:]


def renyi(excess: Array, shift: Array, order: float) -> tuple[Array, Array]:
    r"""D_β(Q‖P) and D_β(P‖Q), by coordinate, of Q = N(shift, 1 + excess) and P = N(0, 1); infinite
    where the first has too wide a tail.

    With r = var(first)/var(second) − 1 and s = 1 − (β−1)r, the divergence is
    β·shift²/(2s·var(second)) − log(s·(1+r)^(β−1))/(2(β−1)).
    """

    def one(r: Array, second: Array) -> Array:
        s = 1 - (order - 1) * r
        finite = np.where(s > 0, s, 1.0)
        logs = np.log1p(np.where(s > 0, s - 1, 0.0)) / (order - 1) + np.log1p(
            np.where(s > 0, r, 0.0)
        )
        return np.where(s > 0, order * shift**2 / (2 * finite * second) - logs / 2, math.inf)

    with np.errstate(divide="ignore"):
        return one(excess, np.ones_like(excess)), one(-excess / (1 + excess), 1 + excess)


def divergences(
    sampler: str, step_size: float, steps: int | None, order: float, dimension: int = DIMENSION
) -> tuple[float, float]:
    """D_β(Q‖P) and D_β(P‖Q) of chain and target, on the data set where they are largest: all
    records pull in one coordinate.

    A larger ``dimension`` has every precision several times.
    """
    found = law(sampler, step_size, steps, PRECISIONS)
    if not (found.excess > -1).all():
        return math.inf, math.inf  # before the first step the position is a point
    # in standard deviations of the target
    far = NUM_DATA * CLIP / np.sqrt(PRECISIONS) * found.forgotten
    both = []
    for centred, shifted in zip(
        renyi(found.excess, np.zeros_like(far), order), renyi(found.excess, far, order), strict=True
    ):
        with np.errstate(invalid="ignore"):
            pulled = np.where(np.isfinite(centred), shifted - centred, 0.0).max()
        both.append(float(dimension / DIMENSION * centred.sum() + pulled))
    return both[0], both[1]


@cache
def largest_step(sampler: str) -> float:
    """Beyond it the chain explodes."""
    if sampler == "overdamped":
        return 2 / LARGEST
    steps = np.geomspace(0.1, 10, 2000)
    stable = [
        abs(np.linalg.eigvals(underdamped_step(h, PRECISIONS, FRICTION)[0])).max() < 1
        for h in steps
    ]
    return float(steps[stable.index(False) - 1])


# -- privacy ---------------------------------------------------------------------------------------


def exact_mu(sampler: str, step_size: float, steps: int | None) -> float:
    """μ of the last state, for the record whose replacement shows most among those that pull in
    one coordinate.
    """
    found = law(sampler, step_size, steps, PRECISIONS)
    mus = 2 * CLIP / np.sqrt(PRECISIONS) * (1 - found.forgotten) / np.sqrt(1 + found.excess)
    return float(mus.max())


def model() -> ops.GLM:
    return ops.GLM("gaussian", prior_std=torch.from_numpy(PRECISIONS**-0.5), noise_std=NOISE_STD)


def certified_mu(step_size: float, steps: int) -> float:
    """μ that FiniteRunLangevin states, through the public interface."""
    certificate = ops.FiniteRunLangevin(steps=steps, step_size=step_size, max_grad_norm=CLIP)
    event = ops.OnePosteriorSample(model(), certificate, num_data=NUM_DATA).event
    assert isinstance(event, MuGaussianDpEvent)
    return event.mu


def close_epsilon(sampler: str, step_size: float, steps: int) -> tuple[float, float, float]:
    """ε that RenyiClose states for the true divergence, at the order where it is least; the
    order and the divergence.
    """
    best = math.inf, math.nan, math.nan
    kind: Any = {"overdamped": ops.Overdamped, "underdamped": ops.Underdamped}[sampler]
    for order in ORDERS:
        divergence = max(divergences(sampler, step_size, steps, order))
        if divergence > 50:
            continue
        certificate = ops.RenyiClose(
            ops.StronglyLogConcave(CLIP), kind(steps, step_size), divergence, order, DELTA
        )
        epsilon, _ = certificate.single_guarantee(model(), Setting(1.0, NUM_DATA, "replace_one"))
        best = min(best, (epsilon, order, divergence))
    return best


def epsilon_of(mu: float) -> float:
    accountant = PrivacyAccountant(neighboring="replace_one")
    return accountant.compose(MuGaussianDpEvent(mu)).get_epsilon(DELTA)


# -- runs ------------------------------------------------------------------------------------------


def run_bias(sampler: str, step_size: float, order: float) -> Row:
    """Of the stationary law."""
    forward, backward = divergences(sampler, step_size, None, order)
    return {"D(chain to target)": forward, "D(target to chain)": backward}


def run_needed(sampler: str, goal: float, order: float, dimension: int, grid: int) -> Row:
    """Fewest steps, over a grid of step sizes, after which both divergences are at most
    ``goal``.
    """
    best = NEVER, math.nan
    for step_size in np.geomspace(1e-6, 1, grid) * largest_step(sampler):

        def near(steps: int | None, step_size: float = float(step_size)) -> bool:
            return max(divergences(sampler, step_size, steps, order, dimension)) <= goal

        if not near(None):
            break
        needed = 1 + bisect_left(range(1, best[0]), True, key=near)
        best = min(best, (needed, float(step_size)))
    return {"steps": best[0], "best step size": best[1]}


def run_privacy(sampler: str, step_size: float, steps: int) -> Row:
    """Exact μ and ε of the last state beside all that is stated of it."""
    mu = exact_mu(sampler, step_size, steps)
    epsilon, order, divergence = close_epsilon(sampler, step_size, steps)
    row: Row = {"exact mu": mu, "exact epsilon": epsilon_of(mu)}
    row |= {"RenyiClose epsilon": epsilon, "RenyiClose order": order}
    row["RenyiClose divergence"] = divergence
    if sampler == "overdamped":
        mu = certified_mu(step_size, steps)
        row |= {"FiniteRun mu": mu, "FiniteRun epsilon": epsilon_of(mu)}
    return row


def run_certificate(step_size: float, steps: int) -> Row:
    """FiniteRunLangevin's divergence, of any order, over the exact one."""
    stated = certified_mu(step_size, steps)
    return {"stated / exact": (stated / exact_mu("overdamped", step_size, steps)) ** 2}


run = one_of(run_privacy, run_certificate, run_bias, run_needed)
ORDER = 8.0
BIAS_ORDERS = (2.0, 32.0)
PRIVACY_STEPS = {"overdamped": (2e-4, 2e-3, 1e-2, 5e-2), "underdamped": (2e-3, 2e-2, 1e-1, 5e-1)}
SHOWN = 1  # of these four
LONG = 1_000_000  # steps after which nothing changes any more
# beyond it the certificate's contraction is not that of the flattest direction
EDGE = 2 / (STRENGTH + SMOOTHNESS)


def jobs(quick: bool) -> list[Row]:
    fine, found = 1 if quick else 3, []
    for sampler in SAMPLERS:
        for order, share in product(BIAS_ORDERS, np.geomspace(1e-4, 0.99, 20 * fine).tolist()):
            step_size = share * largest_step(sampler)
            job = {"what": "bias", "sampler": sampler, "step_size": step_size}
            found.append(job | {"order": order})
        for number, step_size in enumerate(PRIVACY_STEPS[sampler]):
            grid = np.geomspace(10, LONG / 2, 12 * fine).round().astype(int).tolist()
            for steps in [*(grid if number == SHOWN else []), LONG]:
                job = {"what": "privacy", "sampler": sampler, "step_size": step_size}
                found.append(job | {"steps": steps})
        goals = np.geomspace(1e-4, 1, 5 if quick else 9).tolist()
        for goal, dimension in product(goals, (DIMENSION, 100 * DIMENSION)):
            job = {"what": "needed", "sampler": sampler, "goal": goal, "order": ORDER}
            found.append(job | {"dimension": dimension, "grid": 40 if quick else 120})
    for steps, share in product((1, 10, 100, LONG), (0.01, 0.1, 1.0, 2 / SMOOTHNESS / EDGE)):
        step_size = share * EDGE * (1 - 1e-12)
        found.append({"what": "certificate", "step_size": step_size, "steps": steps})
    settings = digest(
        target=(PRECISIONS.tolist(), NUM_DATA, CLIP, NOISE_STD, FAR, SMOOTHNESS),
        chain=(INVERSE_MASS, FRICTION, DELTA, ORDERS),
    )
    return [{**job, "settings": settings} for job in found]


# -- tables and picture ----------------------------------------------------------------------------


def power(rows: Sequence[Row], x: str, y: str) -> float:
    """The slope of logarithms."""
    return float(np.polyfit(*np.log(np.array(columns(rows, x, y))), 1)[0])


def summary(rows: list[Row]) -> list[Row]:
    """What docs/reproductions says of orders, a claim a row."""
    lines: list[Row] = []
    for order in BIAS_ORDERS:
        line: Row = {"": f"stationary divergence of order {order:g} grows with this power of h"}
        for sampler in SAMPLERS:
            # where the bias is small, but far above round-off
            some = [
                row
                for row in having(rows, what="bias", sampler=sampler, order=order)
                if 1e-9 < row["D(chain to target)"] < 1e-4
            ]
            line[sampler] = power(some, "step_size", "D(chain to target)")
        lines.append(line)
    steps: Row = {"": "fewest steps grow with this power of the divergence, below 0.05"}
    more: Row = {"": "and by this factor for 100 times the weights, at 0.0001"}
    for sampler in SAMPLERS:
        found = having(rows, what="needed", sampler=sampler)
        tight = [row for row in having(found, dimension=DIMENSION) if row["goal"] < 0.05]
        steps[sampler] = power(tight, "goal", "steps")
        few, many = (
            min(having(found, dimension=n), key=lambda row: float(row["goal"]))["steps"]
            for n in (DIMENSION, 100 * DIMENSION)
        )
        more[sampler] = many / few
    return [*lines, steps, more]


def tables(rows: list[Row]) -> Mapping[str, Sequence[Row]]:
    def shown(what: str, **values: Any) -> list[Row]:
        some = having(rows, what=what, **values)
        return [{k: v for k, v in row.items() if k not in ("what", "settings")} for row in some]

    exact = epsilon_of(2 * CLIP / math.sqrt(STRENGTH))
    return {
        "Orders": summary(rows),
        f"ε (δ = {DELTA:g}) of the last state; an exact draw has {exact:.3f}": (
            shown("privacy", steps=LONG)
        ),
        f"Divergence that FiniteRunLangevin states over the exact one; 2/(λ+M) = {EDGE:.4g}": (
            shown("certificate")
        ),
    }


def panels(rows: list[Row]) -> list[Panel]:
    def lines(what: str, x: str, ys: Sequence[str], *names: str, **values: Any) -> Row:
        found = {}
        for (key, some), y in product(
            grouped(having(rows, what=what, **values), *names).items(), ys
        ):
            finite = [row for row in some if math.isfinite(row.get(y) or math.inf)]
            found[", ".join(map(str, (*key, y)))] = columns(finite, x, y)
        return found

    last: dict[str, Any] = {}
    stated = ("exact epsilon", "RenyiClose epsilon", "FiniteRun epsilon")
    for sampler in SAMPLERS:
        size = PRIVACY_STEPS[sampler][SHOWN]
        last |= lines("privacy", "steps", stated, "sampler", sampler=sampler, step_size=size)
    both = ("D(chain to target)", "D(target to chain)")
    return [
        Panel(
            "in the end", "h", "divergence", lines("bias", "step_size", both, "sampler", "order")
        ),
        Panel(
            f"fewest steps to order {ORDER:g} below …",
            "divergence, both directions",
            "steps",
            lines("needed", "goal", ["steps"], "sampler", "dimension"),
        ),
        Panel(f"ε of the last state, δ = {DELTA:g}", "steps", "", last),
    ]


def main(arguments: list[str] | None = None) -> list[Row]:
    options = parser_of(__doc__, "reproduce_renyi_langevin").parse_args(arguments)
    return finish(options, run, jobs(options.quick), tables=tables, panels=panels)


if __name__ == "__main__":
    main()
