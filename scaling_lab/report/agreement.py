"""Whether runs computed the same: losses and gradient norms, step by step. Owns which runs may be compared, and how exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scaling_lab.report.units import plural
from scaling_lab.results.metrics import Result, at

#: Largest relative difference of equal losses, in float32, and the steps over which it is asked for: rounding grows later.
#: Narrower dtypes round so coarsely that no such number tells a fault from rounding: there only the difference is told.
TOLERANCE = 1e-5
FIRST_STEPS = 3

#: Keys that must not change a loss: runs that differ in them alone are compared.
FREE = {
    "workload": ("name", "untimed_steps", "accumulation", "remat", "context", "loss_chunks", "evaluation"),
    "data": ("record_samples",),
    "model": ("name", "vocab_multiple"),
}


@dataclass(frozen=True)
class Agreement:
    """How a run's losses follow those of the first run like it.

    equal_steps: leading steps whose loss and gradient norm are both equal; steps: those compared; largest: relative
    difference over all of them; is_reference: it is that first run; dtype: the narrower one of the run's precision, if any
    """

    equal_steps: int
    steps: int
    largest: float
    is_reference: bool = False
    dtype: str = "float32"

    @property
    def is_equal(self) -> bool:
        """Whether the first steps are equal: later ones drift apart by rounding alone."""
        return self.equal_steps >= min(FIRST_STEPS, self.steps)

    @property
    def words(self) -> str:
        """For a table: `reference`, `yes, all 100 steps`, `first 61 of 100 steps`, `NO, from step 1`, `bfloat16: ... apart`."""
        if self.is_reference:
            return "reference"
        if self.dtype != "float32":
            return f"{self.dtype}: " + (f"up to {self.largest:.1e} apart" if self.largest else "equal")
        if not self.is_equal:
            return f"NO, from step {self.equal_steps + 1} (up to {self.largest:.1e})"
        if self.equal_steps == self.steps:
            return f"yes, all {plural(self.steps, 'step')}"
        return f"first {self.equal_steps} of {plural(self.steps, 'step')}"


def agreements(results: Sequence[Result | None]) -> list[Agreement | None]:
    """For each run, how it agrees with the first ok run of the same model, workload and data; None where it has no losses."""
    references: dict[str, Result] = {}
    found: list[Agreement | None] = []
    for result in results:
        if result is None or result["status"] != "ok" or not at(result, "measured.loss"):
            found.append(None)
            continue
        reference = references.setdefault(_task(result), result)
        found.append(compare(result, reference))
    return found


def compare(result: Result, reference: Result) -> Agreement:
    """Step by step, over the steps that both have."""
    differences = [
        max(_relative(*pair) for pair in step)
        for step in zip(
            zip(result["measured"]["loss"], reference["measured"]["loss"], strict=False),
            zip(result["measured"]["grad_norm"], reference["measured"]["grad_norm"], strict=False),
            strict=True,
        )
    ]
    equal = next((step for step, difference in enumerate(differences) if not difference <= TOLERANCE), len(differences))
    return Agreement(equal, len(differences), max(differences, default=0.0), result is reference, _dtype(result))


def _dtype(result: Result) -> str:
    """The first dtype of its precision that is not float32, the products' before those of storage and sums."""
    precision = at(result, "experiment.workload.precision") or {}
    used = [precision.get(key) or "float32" for key in ("compute", "params", "reduce")]
    return next((dtype for dtype in used if dtype != "float32"), "float32")


def _relative(value: float | None, reference: float | None) -> float:
    if value is None or reference is None:
        return 0.0 if value is reference else float("inf")
    return abs(value - reference) / max(abs(reference), 1e-30) if value != reference else 0.0


def _task(result: Result) -> str:
    """What a run was asked to learn, from what: text equal for runs whose losses should be.

    Results of other versions of the lab lack keys, or have more facts of the corpus: a key that is off counts as absent, and
    of the corpora only the hashes do.
    """
    experiment = result["experiment"]
    task = {group: _without(experiment.get(group) or {}, free) for group, free in FREE.items()}
    corpora = {name: at(result, f"measured.{name}.sha256") for name in ("corpus", "corpus.validation")}
    return json.dumps({**task, **corpora}, sort_keys=True)


def _without(values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in names and value is not None and value is not False}
