"""How near discretised Langevin dynamics comes to its target in Rényi divergence, and what the
certificates make of that (Ganesh, Talwar 2020).

    reproduce_renyi_langevin.py --quick       # coarse grids, half a minute
    reproduce_renyi_langevin.py --full        # fine ones, for docs/reproductions
    reproduce_renyi_langevin.py --full --csv FILE --picture FILE

Their theorems bound the divergence, in both directions, of the overdamped and the underdamped chain
from a strongly log-concave target, with constants that they do not state. Where the target is
Gaussian every law on the way is Gaussian, and all of it can be computed: the divergence after every
number of steps, its floor (the stationary bias of a step size), and the privacy of the last state
beside what the library certifies.

The model is the library's: a ``GLM("gaussian")`` with 10 weights, prior precisions 1 to 10,
gradients clipped to 1/4, and 100 records, all of them so far outside that their clipped gradients
are constant. The posterior is then N(m, diag(1/precision)), only m depends on the records, and it
lies up to 25 posterior standard deviations from the start. A record that is replaced moves the
gradient by 1/2 at most, and an exact draw is 1/2-Gaussian differentially private.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import reproduction
import torch
from numpy.typing import NDArray
from reproduction import Rows
from scipy.linalg import expm
from scipy.optimize import brentq

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
# the second is the fastest without noise
FRICTIONS = {"underdamped": 2.0, "underdamped, critical": 2 * math.sqrt(INVERSE_MASS * STRENGTH)}
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
    move, noise = underdamped_step(step_size, precision, FRICTIONS[sampler])
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
        abs(np.linalg.eigvals(underdamped_step(h, PRECISIONS, FRICTIONS[sampler])[0])).max() < 1
        for h in steps
    ]
    return float(steps[stable.index(False) - 1])


def finite_until(sampler: str, order: float) -> float:
    """Step size from which on D_β(Q‖P) is infinite in the end, where the excess of a variance
    is 1/(β − 1).
    """

    def beyond(step_size: float) -> float:
        return float(law(sampler, step_size, None, PRECISIONS).excess.max()) - 1 / (order - 1)

    return float(brentq(beyond, 1e-6, 0.999 * largest_step(sampler)))


# -- privacy ---------------------------------------------------------------------------------------


def exact_mu(sampler: str, step_size: float, steps: int | None) -> tuple[float, float]:
    """μ of the last state: for the record whose replacement shows most, and least, among
    those that pull in one coordinate.
    """
    found = law(sampler, step_size, steps, PRECISIONS)
    mus = 2 * CLIP / np.sqrt(PRECISIONS) * (1 - found.forgotten) / np.sqrt(1 + found.excess)
    return float(mus.max()), float(mus.min())


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
    return (
        PrivacyAccountant(neighboring="replace_one")
        .compose(MuGaussianDpEvent(mu))
        .get_epsilon(DELTA)
    )


# -- runs ------------------------------------------------------------------------------------------


def run(what: str, settings: str, **arguments: Any) -> dict[str, Any]:
    """One finished row of the CSV; ``settings`` tell runs apart only."""
    return RUNS[what](**arguments)


def run_path(sampler: str, step_size: float, order: float, steps: int) -> dict[str, Any]:
    forward, backward = divergences(sampler, step_size, steps, order)
    return {"D(chain to target)": forward, "D(target to chain)": backward}


def run_bias(sampler: str, step_size: float, order: float) -> dict[str, Any]:
    forward, backward = divergences(sampler, step_size, None, order)
    return {"D(chain to target)": forward, "D(target to chain)": backward}


def run_needed(
    sampler: str, goal: float, order: float, dimension: int, grid: int
) -> dict[str, Any]:
    """Fewest steps, over a grid of step sizes, after which both divergences are at most
    ``goal``.
    """
    best = NEVER, math.nan
    for step_size in np.geomspace(1e-6, 1, grid) * largest_step(sampler):

        def near(steps: int, step_size: float = float(step_size)) -> bool:
            return max(divergences(sampler, step_size, steps, order, dimension)) <= goal

        if max(divergences(sampler, step_size, None, order, dimension)) > goal:
            break
        low, high = 0, 1
        while high < best[0] and not near(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if near(middle) else (middle, high)
        best = min(best, (high, float(step_size)))
    return {"steps": best[0], "best step size": best[1]}


def run_privacy(sampler: str, step_size: float, steps: int) -> dict[str, Any]:
    """Exact μ and ε of the last state beside all that is stated of it."""
    most, least = exact_mu(sampler, step_size, steps)
    epsilon, order, divergence = close_epsilon(sampler, step_size, steps)
    row = {"exact mu": most, "least exact mu": least, "exact epsilon": epsilon_of(most)}
    row |= {
        "RenyiClose epsilon": epsilon,
        "RenyiClose order": order,
        "RenyiClose divergence": divergence,
    }
    if sampler == "overdamped":
        mu = certified_mu(step_size, steps)
        composed = 2 * CLIP * math.sqrt(step_size * steps / 2)  # every state released
        row |= {
            "FiniteRun mu": mu,
            "FiniteRun epsilon": epsilon_of(mu),
            "composed epsilon": epsilon_of(composed),
        }
    return row


def run_certificate(step_size: float, steps: int) -> dict[str, Any]:
    most, least = exact_mu("overdamped", step_size, steps)
    return {
        "exact mu": most,
        "least exact mu": least,
        "FiniteRun mu": certified_mu(step_size, steps),
    }


def run_simulation(
    sampler: str, step_size: float, steps: int, copies: int, repeats: int
) -> dict[str, Any]:
    """Draws of the library, ``repeats`` of ``copies`` times the ten coordinates, against the law:
    (draw − mean)/sd has mean 0 and variance 1.

    The records pull in the first ten coordinates, ten in each, and the mean is that of these.
    """
    precision = np.tile(PRECISIONS, copies)
    glm = ops.GLM("gaussian", prior_std=torch.from_numpy(precision**-0.5), noise_std=NOISE_STD)
    certificate: ops.Certificate = ops.FiniteRunLangevin(
        steps=steps, step_size=step_size, max_grad_norm=CLIP
    )
    if sampler == "underdamped":
        chain = ops.Underdamped(steps, step_size, FRICTIONS[sampler], INVERSE_MASS)
        certificate = ops.RenyiClose(
            ops.StronglyLogConcave(CLIP), chain, divergence=1.0, order=2.0, delta=DELTA
        )
    features = torch.eye(DIMENSION, len(precision), dtype=torch.float64).repeat(
        NUM_DATA // DIMENSION, 1
    )
    sample = ops.OnePosteriorSample(glm, certificate, num_data=NUM_DATA)
    draws = torch.stack(
        [
            sample.sample(features, torch.full((NUM_DATA,), FAR, dtype=torch.float64))["weights"]
            for _ in range(repeats)
        ]
    ).numpy()
    found = law(sampler, step_size, steps, precision)
    mean = features.sum(0).numpy() * CLIP / precision * (1 - found.forgotten)
    standard = (draws - mean) * np.sqrt(precision / (1 + found.excess))
    size, pulled = standard.size, standard[:, :DIMENSION]
    return {
        "draws": size,
        "mean, in standard errors": float(pulled.mean() * math.sqrt(pulled.size)),
        "variance / law": float((standard**2).mean()),
        "variance, in standard errors": float(((standard**2).mean() - 1) * math.sqrt(size / 2)),
        "variance / target": float(((draws - mean) ** 2 * precision).mean()),
    }


RUNS: dict[str, Callable[..., dict[str, Any]]] = {
    "path": run_path,
    "bias": run_bias,
    "needed": run_needed,
    "privacy": run_privacy,
    "certificate": run_certificate,
    "simulation": run_simulation,
}
PATH_STEPS = {"overdamped": (0.002, 0.01, 0.05), "underdamped": (0.02, 0.1, 0.5)}
PATH_ORDER = 8.0
BIAS_ORDERS = (2.0, 32.0)
PRIVACY_STEPS = {"overdamped": (2e-4, 2e-3, 1e-2, 5e-2), "underdamped": (2e-3, 2e-2, 1e-1, 5e-1)}
SHOWN = 1  # of these four
SIMULATED = {"overdamped": ((0.15, 40), (0.03, 40)), "underdamped": ((1.0, 60), (0.2, 60))}
LONG = 1_000_000  # steps after which nothing changes any more
# beyond it the certificate's contraction is not that of the flattest direction
EDGE = 2 / (STRENGTH + SMOOTHNESS)
CERTIFICATE_STEPS = (1, 10, 100, LONG)


def jobs(full: bool) -> list[dict[str, Any]]:
    fine = 3 if full else 1
    found: list[dict[str, Any]] = []
    for sampler in SAMPLERS:
        for step_size, steps in SIMULATED[sampler]:
            size = {"copies": 200, "repeats": 300 if full else 30}
            found.append(
                {"what": "simulation", "sampler": sampler, "step_size": step_size, "steps": steps}
                | size
            )
        for step_size in PATH_STEPS[sampler]:
            for steps in whole(np.geomspace(1, 10_000, 40 * fine)):
                found.append(
                    {
                        "what": "path",
                        "sampler": sampler,
                        "step_size": step_size,
                        "order": PATH_ORDER,
                        "steps": steps,
                    }
                )
        for order in BIAS_ORDERS:
            for share in np.geomspace(1e-4, 0.99, 20 * fine).tolist():
                found.append(
                    {
                        "what": "bias",
                        "sampler": sampler,
                        "step_size": share * largest_step(sampler),
                        "order": order,
                    }
                )
        for number, step_size in enumerate(PRIVACY_STEPS[sampler]):
            for steps in [
                *(whole(np.geomspace(10, LONG / 2, 12 * fine)) if number == SHOWN else []),
                LONG,
            ]:
                found.append(
                    {"what": "privacy", "sampler": sampler, "step_size": step_size, "steps": steps}
                )
    for sampler in ("overdamped", *FRICTIONS):
        for goal in np.geomspace(1e-4, 1, 9 if full else 5).tolist():
            for dimension in (DIMENSION, 100 * DIMENSION):
                size = {"dimension": dimension, "grid": 120 if full else 40}
                found.append(
                    {"what": "needed", "sampler": sampler, "goal": goal, "order": PATH_ORDER} | size
                )
    shares = [
        *np.geomspace(0.01, 1, 8 * fine).tolist(),
        *np.linspace(1, 2 / SMOOTHNESS / EDGE, 4 * fine).tolist()[1:],
    ]
    found += [
        {"what": "certificate", "step_size": share * EDGE * (1 - 1e-12), "steps": steps}
        for steps in CERTIFICATE_STEPS
        for share in shares
    ]
    target = {
        "precisions": PRECISIONS.tolist(),
        "records": NUM_DATA,
        "clip": CLIP,
        "noise": NOISE_STD,
        "far": FAR,
        "smoothness": SMOOTHNESS,
    }
    chain = {
        "mass": INVERSE_MASS,
        "frictions": FRICTIONS,
        "delta": DELTA,
        "orders": ORDERS,
        "never": NEVER,
    }
    settings = reproduction.digest(**target, **chain)
    return [{**job, "settings": settings} for job in found]


def whole(values: Array) -> list[int]:
    return sorted({round(value) for value in values.tolist()})


# -- tables and picture ----------------------------------------------------------------------------


def summary(rows: Rows) -> list[dict[str, Any]]:
    """What docs/reproductions says, a claim a row."""
    lines: list[dict[str, Any]] = []

    def say(
        claim: str,
        value: Callable[[str], float],
        form: str = ".3g",
        samplers: Sequence[str] = SAMPLERS,
    ) -> None:
        lines.append({"": claim} | {sampler: format(value(sampler), form) for sampler in samplers})

    def small(sampler: str, order: float) -> Rows:
        """Where the bias is small, but far above round-off."""
        return Rows(
            row
            for row in rows.of("bias", sampler=sampler, order=order)
            if 1e-9 < row["D(chain to target)"] < 1e-4
        )

    for order in BIAS_ORDERS:
        power = {s: small(s, order).slope("step_size", "D(chain to target)") for s in SAMPLERS}
        say(
            f"stationary divergence of order {order:g} grows with this power of h",
            power.__getitem__,
        )
    for order in BIAS_ORDERS:
        share = {s: finite_until(s, order) / largest_step(s) for s in SAMPLERS}
        say(
            f"it is finite at order {order:g} up to this share of the largest stable h",
            share.__getitem__,
        )
    for goal in (1.0, 1e-2, 1e-4):
        for sampler, title in {
            "underdamped": "",
            "underdamped, critical": ", friction 2√(uλ)",
        }.items():
            found = {
                "overdamped": rows.of("needed", sampler="overdamped"),
                "underdamped": rows.of("needed", sampler=sampler),
            }
            value = {
                s: f.at("steps", goal=goal, dimension=DIMENSION)
                for s, f in found.items()
                if s == "underdamped" or not title
            }
            say(
                f"fewest steps to divergences of order {PATH_ORDER:g} below {goal:g}{title}",
                value.__getitem__,
                ",.0f",
                list(value),
            )
    tight = {
        s: Rows(
            row for row in rows.of("needed", sampler=s, dimension=DIMENSION) if row["goal"] < 0.05
        )
        for s in SAMPLERS
    }
    say(
        "they grow with this power of the divergence, below 0.05",
        lambda s: tight[s].slope("goal", "steps"),
    )
    more = {
        s: [
            rows.of("needed", sampler=s).at("steps", goal=1e-4, dimension=n)
            for n in (DIMENSION, 100 * DIMENSION)
        ]
        for s in SAMPLERS
    }
    say(
        "and by this factor if there are 100 times as many weights, at 0.0001",
        lambda s: more[s][1] / more[s][0],
    )
    worst = {
        s: max(rows.of("simulation", sampler=s).columns("variance, in standard errors")[0], key=abs)
        for s in SAMPLERS
    }
    say(
        "draws of the library: their variance less that of the law, in standard errors",
        lambda s: worst[s],
        "+.1f",
    )
    more_than = {s: rows.of("simulation", sampler=s)[0]["variance / target"] - 1 for s in SAMPLERS}
    say(
        "by how much that is more than the target's, at the larger h of these",
        more_than.__getitem__,
        ".1%",
    )
    return lines


def privacy_table(rows: Rows) -> list[dict[str, Any]]:
    """ε of the last state in the end."""
    lines = []
    for sampler in SAMPLERS:
        for row in rows.of("privacy", sampler=sampler, steps=LONG):
            line = {
                "": f"{sampler}, h = {row['step_size']:g}",
                **{
                    name: row.get(f"{name} epsilon")
                    for name in ("exact", "FiniteRun", "RenyiClose")
                },
            }
            lines.append(
                {
                    **line,
                    "order": row["RenyiClose order"],
                    "divergence": row["RenyiClose divergence"],
                }
            )
    return lines


def certificate_table(rows: Rows) -> list[dict[str, Any]]:
    """FiniteRunLangevin's divergence, of any order, over the exact one."""
    lines = []
    for steps in CERTIFICATE_STEPS:
        found = rows.of("certificate", steps=steps)
        size, stated, most, least = found.columns(
            "step_size", "FiniteRun mu", "exact mu", "least exact mu"
        )
        parts = {"h ≤ 2/(λ+M)": size <= EDGE, "h = 2/M": size >= size.max()}
        line: dict[str, Any] = {"": f"{steps:,} step{'s' if steps > 1 else ''}"}
        for name, part in parts.items():
            line[f"{name}, least"], line[f"{name}, most"] = (
                ((stated / most) ** 2)[part].min(),
                ((stated / most) ** 2)[part].max(),
            )
        lines.append(line | {"small h, record that shows least": float(((stated / least) ** 2)[0])})
    return lines


def draw(rows: Rows, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(2, 3, figsize=(15, 9), layout="constrained")
    axes: list[Any] = list(grid.flat)
    colours = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    forward, backward = "D(chain to target)", "D(target to chain)"

    def line(
        axis: Any, found: Sequence[dict[str, Any]], x: str, y: str, *style: Any, **options: Any
    ) -> None:
        there = [(row[x], row[y]) for row in found if math.isfinite(row[y])]
        axis.plot(*(zip(*there, strict=True) if there else ([], [])), *style, **options)

    for axis, sampler in zip(axes, SAMPLERS, strict=False):
        for colour, size in zip(colours, PATH_STEPS[sampler], strict=False):
            found = rows.of("path", sampler=sampler, step_size=size)
            line(axis, found, "steps", forward, color=colour, label=f"h = {size:g}")
            line(axis, found, "steps", backward, "--", color=colour)
            ends = [
                value
                for value in divergences(sampler, size, None, PATH_ORDER)
                if math.isfinite(value)
            ]
            axis.plot([1e4] * len(ends), ends, "o", color=colour, markersize=4, clip_on=False)
        axis.plot([], [], "k-", label="chain to target")
        axis.plot([], [], "k--", label="target to chain")
        axis.plot([], [], "ko", markersize=4, label="in the end")
        axis.set(
            title=f"{sampler}: divergence of order {PATH_ORDER:g}, where finite",
            xscale="log",
            yscale="log",
            xlabel="steps",
        )
        axis.set(xlim=(1, 1e4), ylim=(1e-4, 1e5))
        axis.legend(fontsize="x-small", loc="lower left")

    axis = axes[2]
    for colour, sampler in zip(colours, SAMPLERS, strict=False):
        for width, order in zip((1.0, 2.5), BIAS_ORDERS, strict=True):
            shares = [
                {**row, "share": row["step_size"] / largest_step(sampler)}
                for row in rows.of("bias", sampler=sampler, order=order)
            ]
            line(
                axis,
                shares,
                "share",
                forward,
                color=colour,
                linewidth=width,
                label=f"{sampler}, order {order:g}",
            )
            line(axis, shares, "share", backward, "--", color=colour, linewidth=width)
    axis.set(
        title="in the end (dashed: target to chain)",
        xscale="log",
        yscale="log",
        xlabel="step size / largest stable one",
        ylabel="divergence",
    )
    axis.legend(fontsize="x-small")

    axis = axes[3]
    for colour, sampler in zip(colours, ("overdamped", *FRICTIONS), strict=False):
        for style, dimension in (("o-", DIMENSION), ("s--", 100 * DIMENSION)):
            found = rows.of("needed", sampler=sampler, dimension=dimension)
            line(
                axis,
                found,
                "goal",
                "steps",
                style,
                color=colour,
                markersize=5,
                label=f"{sampler}, {dimension:,} weights",
            )
    axis.set(
        title=f"fewest steps to order {PATH_ORDER:g} below …",
        xscale="log",
        yscale="log",
        xlabel="divergence, both directions",
        ylabel="steps",
    )
    axis.legend(fontsize="x-small")

    axis = axes[4]
    over, under = (
        rows.of("privacy", sampler=sampler, step_size=PRIVACY_STEPS[sampler][SHOWN])
        for sampler in SAMPLERS
    )
    line(
        axis,
        over,
        "steps",
        "FiniteRun epsilon",
        "-",
        color="gold",
        linewidth=5,
        label="overdamped, FiniteRunLangevin",
    )
    line(axis, over, "steps", "exact epsilon", "-", color=colours[0], label="overdamped, exact")
    line(
        axis,
        over,
        "steps",
        "RenyiClose epsilon",
        "--",
        color=colours[0],
        label="overdamped, RenyiClose",
    )
    line(axis, under, "steps", "exact epsilon", "-", color=colours[1], label="underdamped, exact")
    line(
        axis,
        under,
        "steps",
        "RenyiClose epsilon",
        "--",
        color=colours[1],
        label="underdamped, RenyiClose",
    )
    line(
        axis,
        over,
        "steps",
        "composed epsilon",
        ":",
        color="dimgray",
        label="overdamped, all states released",
    )
    axis.axhline(
        epsilon_of(2 * CLIP / math.sqrt(STRENGTH)),
        color="black",
        linewidth=0.8,
        label="an exact draw",
    )
    sizes = " and ".join(f"{PRIVACY_STEPS[sampler][SHOWN]:g}" for sampler in SAMPLERS)
    axis.set(
        title=f"ε of the last state, δ = {DELTA:g}, h = {sizes}",
        xscale="log",
        yscale="log",
        xlabel="steps",
        ylim=(0.1, 30),
    )
    axis.legend(fontsize="x-small", loc="lower right")

    axis = axes[5]
    for colour, steps in zip(colours, CERTIFICATE_STEPS, strict=False):
        pairs = [("exact mu", "-", 1.5), ("least exact mu", "--", 0.8)]
        for name, style, width in pairs:
            ratios = [
                {**row, "ratio": (row["FiniteRun mu"] / row[name]) ** 2}
                for row in rows.of("certificate", steps=steps)
            ]
            label = f"{steps:,} step{'s' if steps > 1 else ''}" if style == "-" else None
            line(
                axis,
                ratios,
                "step_size",
                "ratio",
                style,
                color=colour,
                linewidth=width,
                label=label,
            )
    axis.plot([], [], "k--", linewidth=0.8, label="for the record that shows least")
    for place, name in ((EDGE, "2/(λ+M) "), (2 / SMOOTHNESS, "")):
        axis.axvline(place, color="black", linewidth=0.8, linestyle=":")
        axis.text(place, 3e3, name, ha="right", fontsize="small")
    axis.set(
        title="FiniteRunLangevin: stated / exact divergence",
        xscale="log",
        yscale="log",
        xlabel="step size h, up to 2/M",
        ylim=(0.7, 1e4),
    )
    axis.legend(fontsize="x-small", loc="upper left")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    rows, runs = reproduction.command(run, jobs, draw, __doc__, arguments)
    tables = [
        reproduction.markdown(summary(rows), {"": "", **dict.fromkeys(SAMPLERS, "")}),
        (
            f"ε (δ = {DELTA:g}) of the last of {LONG:,} steps; an exact draw has"
            f" {epsilon_of(2 * CLIP / math.sqrt(STRENGTH)):.3f}."
        ),
        reproduction.markdown(
            privacy_table(rows),
            {
                "": "",
                **dict.fromkeys(("exact", "FiniteRun", "RenyiClose"), ".3f"),
                "order": ".3g",
                "divergence": ".2g",
            },
        ),
        "Divergence that FiniteRunLangevin states, of any order, over the exact one.",
        reproduction.markdown(
            found := certificate_table(rows),
            {name: "" if name == "" else ".4g" for name in found[0]},
        ),
        reproduction.origin(runs, arguments),
    ]
    print("\n\n".join(tables))
    return rows


if __name__ == "__main__":
    main()
