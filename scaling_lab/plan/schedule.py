"""The learning rate of every optimizer step, counted in optimizer steps: the same number for both backends. Pure arithmetic."""

from __future__ import annotations

import math

from scaling_lab.plan.experiment import Optimizer


def learning_rate(optimizer: Optimizer, steps: int, step: int) -> float:
    """Learning rate of optimizer step `step` (0 is the first) of a run of `steps`.

    Warm-up rises linearly, lr x (step + 1) / warmup_steps; then the schedule falls from lr towards final_lr_fraction x lr,
    which it would reach at step `steps` and keeps from there on.
    """
    warmup = optimizer.warmup_steps
    if step < warmup:
        return optimizer.lr * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    final = optimizer.final_lr_fraction
    return optimizer.lr * (final + (1.0 - final) * _remaining(optimizer.schedule, progress))


def _remaining(schedule: str, progress: float) -> float:
    """How much of the way from the end down to the peak is left: 1 at the start of the schedule, 0 at its end."""
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))
