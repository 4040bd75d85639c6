"""What a run will cost and sample, known before anything is spent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """What a run will cost and sample, known before anything is spent."""

    langevin_noise_multiplier: float
    noise_multiplier: float
    effective_noise_multiplier: float
    effective_temperature: float
    temperature: float
    sample_rate: float
    steps: int
    epsilon: float
    delta: float
    target_epsilon: float | None
    lr: float
    free_lr: float

    def __str__(self) -> str:
        lines = [
            (
                f"noise multiplier      z_L = {self.langevin_noise_multiplier:.4g} (the sampler's"
                f" own), z_min = {self.noise_multiplier:.4g} (the floor); in force:"
                f" {self.effective_noise_multiplier:.4g}"
            ),
            (
                f"temperature           {self.effective_temperature:.4g} from the Gaussian noise;"
                f" asked for: {self.temperature:.4g}"
            ),
            f"steps                 {self.steps} at sampling rate {self.sample_rate:.6g}",
            (
                f"privacy               ({self.epsilon:.4g}, {self.delta:.3g}) at the end, what was"
                " spent before included"
            ),
            f"privacy is free up to lr = {self.free_lr:.4g} (now {self.lr:.4g})",
        ]
        if (
            self.target_epsilon is not None
            and self.langevin_noise_multiplier > self.noise_multiplier > 0
        ):
            colder = (
                self.temperature * (self.noise_multiplier / self.langevin_noise_multiplier) ** 2
            )
            lines.append(
                f"epsilon = {self.target_epsilon:.4g} was asked for, but at temperature"
                f" {self.temperature:.4g} the sampler's own noise decides. lr = {self.free_lr:.4g}"
                f" or temperature = {colder:.3g} would use the rest."
            )
        return "\n".join(lines)
