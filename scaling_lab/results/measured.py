"""The `measured` part of a result, from records. Owns the statistics of steps and the parts of the wall time.

A job that failed has as much of it as its records tell; what they do not tell is null.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from scaling_lab.results.records import Record
from scaling_lab.results.schema import ROUTER_METRICS, TIME_PARTS


def measured(
    records: Sequence[Record],
    *,
    wall_time_s: float | None,
    coordinator_startup_s: float | None,
    peak_measurement_s: float | None = None,
) -> dict[str, Any]:
    """Everything measured but the rates, which `metrics` derives.

    records: those of process 0, and the `done` record of every process
    wall_time_s: from the shell's start to the end of the job; coordinator_startup_s: from the shell's start to that of the
    workers, where their clocks begin: it is part of `startup`; peak_measurement_s: what measuring this machine's peak took
    """
    steps = steps_of(records)
    timed = [step for step in steps if step.get("timed")]
    ends = _ends(records)
    return {
        **_step_time([step["step_time_s"] for step in timed if step.get("step_time_s") is not None]),
        "bubble_share": _median(step.get("bubble_share") for step in timed),
        "loss": _finite(steps, "loss"),
        "grad_norm": _finite(steps, "grad_norm"),
        **{name: _reported(steps, name) for name in ROUTER_METRICS},
        "nonfinite_steps": [step["step"] for step in steps if not _is_finite(step.get("loss"))],
        "steps": len(steps),
        "evaluation": _evaluations(records),
        "tokens_seen": steps[-1].get("tokens_seen") if steps else None,
        "valid_tokens_seen": _sum(step.get("valid_tokens") for step in steps),
        "cpu_time_per_step_s": _sum(end.get("cpu_time_per_step_s") for end in ends),
        "bytes_per_device": _largest(end.get("bytes_per_device") for end in ends),
        "resident_bytes": _sum(end.get("resident_bytes") for end in ends),
        "compilations": _max(end.get("compilations") for end in ends),
        "layouts": next((end["layouts"] for end in ends if end.get("layouts")), None),
        "layouts_equal_plan": _all(end.get("layouts_equal_plan") for end in ends),
        "corpus": next((end["corpus"] for end in ends if end.get("corpus")), None),
        "collectives": None,
        "wall_time_s": wall_time_s,
        "time_parts_s": time_parts(
            records,
            wall_time_s=wall_time_s,
            coordinator_startup_s=coordinator_startup_s,
            peak_measurement_s=peak_measurement_s,
        ),
    }


def steps_of(records: Iterable[Record]) -> list[Record]:
    """The step records of one process in the order of their steps, each step once."""
    steps: dict[int, Record] = {}
    for record in records:
        if record.get("kind") == "step" and not record.get("process"):
            steps.setdefault(record["step"], record)
    return [steps[step] for step in sorted(steps)]


def _ends(records: Iterable[Record]) -> list[Record]:
    """The `done` record of each process, in order, each once."""
    ends = {record.get("process") or 0: record for record in records if record.get("kind") == "done"}
    return [ends[process] for process in sorted(ends)]


def time_parts(
    records: Sequence[Record],
    *,
    wall_time_s: float | None,
    coordinator_startup_s: float | None,
    peak_measurement_s: float | None = None,
) -> dict[str, float | None]:
    """Seconds of the wall time by part; `other` is what the named parts leave, so they add up to it.

    The parts are those of the first process's `done` record; of a job without one, what it told on its way: start-up and
    compilation, steps and evaluations.
    """
    ends = _ends(records)
    parts = dict.fromkeys(TIME_PARTS) | (ends[0]["time_parts_s"] if ends else _sums(records))
    if coordinator_startup_s is not None:
        parts["startup"] = coordinator_startup_s + (parts["startup"] or 0.0)
    if peak_measurement_s is not None:
        parts["peak_measurement"] = peak_measurement_s
    named = sum(value for part, value in parts.items() if value is not None and part != "other")
    parts["other"] = None if wall_time_s is None else max(0.0, wall_time_s - named)
    return parts


def _sums(records: Sequence[Record]) -> dict[str, float | None]:
    steps = steps_of(records)
    own = [record for record in records if not record.get("process")]
    evaluations = [r.get("time_s") for r in own if r.get("kind") == "evaluation"]
    prepared = next((r for r in own if r.get("kind") == "prepared"), {})
    return {
        "startup": prepared.get("startup_s"),
        "compile": prepared.get("compile_s"),
        "untimed_steps": _sum(step.get("step_time_s") for step in steps if not step.get("timed")),
        "timed_steps": _sum(step.get("step_time_s") for step in steps if step.get("timed")),
        "evaluation": _sum(evaluations),
    }


def _step_time(times: list[float]) -> dict[str, Any]:
    if not times:
        return {"step_time_s": None, "step_time_distribution_s": {"p10": None, "p90": None, "mean": None, "count": 0}}
    p10, median, p90 = (float(value) for value in np.percentile(times, (10, 50, 90)))
    spread = {"p10": p10, "p90": p90, "mean": float(np.mean(times)), "count": len(times)}
    return {"step_time_s": median, "step_time_distribution_s": spread}


def _evaluations(records: Sequence[Record]) -> list[dict[str, Any]]:
    found = {r["step"]: r for r in records if r.get("kind") == "evaluation" and not r.get("process")}
    keys = ("step", "loss", "tokens", "time_s")
    return [{key: _number(found[step].get(key)) for key in keys} for step in sorted(found)]


def _finite(steps: Sequence[Record], key: str) -> list[float | None]:
    return [_number(step.get(key)) for step in steps]


def _reported(steps: Sequence[Record], key: str) -> list[float | None] | None:
    """The same of what not every model reports, null where no step has it."""
    return _finite(steps, key) if any(key in step for step in steps) else None


def _number(value: Any) -> Any:
    """The value, or null where JSON has no word for it; `nonfinite_steps` says where that was."""
    return value if _is_finite(value) else None


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _largest(found: Iterable[dict[str, Any] | None]) -> dict[str, Any]:
    """The bytes of the process whose device holds most: no process may hide behind another."""
    known = [entry for entry in found if entry]

    def held(entry: Any) -> float:
        return entry.get("total") or sum(value for value in entry.values() if value)

    return {"total": None, **max(known, key=held)} if known else {"total": None}


def _sum(found: Iterable[Any]) -> Any:
    known = [value for value in found if value is not None]
    return sum(known) if known else None


def _all(found: Iterable[bool | None]) -> bool | None:
    known = [value for value in found if value is not None]
    return all(known) if known else None


def _median(found: Iterable[Any]) -> Any:
    known = [value for value in found if value is not None]
    return statistics.median(known) if known else None


def _max(found: Iterable[Any]) -> Any:
    return max((value for value in found if value is not None), default=None)
