"""Records and results of jobs, made by hand so that every number can be checked by hand. The numbers are in the docstrings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments import FOUND, experiment

from scaling_lab.plan.plan import make_plan
from scaling_lab.predict.peak import DevicePeak
from scaling_lab.results.result import Facts, build

#: Half of this is what the sample job reaches: 6,494,976 FLOPs a token x 4,096 tokens / 0.25 s / 8 devices = 13,301,710,848.
PEAK = 26_603_421_696.0

TIMES_S = (5.0, 1.0, 0.4, 0.1, 0.3, 0.2)


def records(losses: tuple[float, ...] = (5.5, 5.0, 4.5, 4.0, 3.5, 3.0), process: int = 0) -> list[dict[str, Any]]:
    """Six steps of 16 x 256 = 4,096 tokens, of which the first two are untimed, and one evaluation; then `done`."""
    told: list[dict[str, Any]] = [
        {"kind": "phase", "phase": "startup", "process": process},
        {"kind": "start", "process": process, "device_facts": {"platform": "cpu", "kind": "cpu", "count": 8}},
    ]
    for step, (loss, time_s) in enumerate(zip(losses, TIMES_S, strict=True), start=1):
        told.append(
            {
                "kind": "step",
                "process": process,
                "step": step,
                "loss": loss,
                "grad_norm": loss / 2,
                "lr": step * 1e-3,
                "valid_tokens": 3_072,
                "step_time_s": time_s,
                "timed": step > 2,
                "tokens": 4_096,
                "tokens_seen": 4_096 * step,
                "cpu_time_s": 2 * time_s,
            }
        )
    told.append({"kind": "evaluation", "process": process, "step": 6, "loss": 3.25, "tokens": 16_384, "time_s": 0.5})
    return [*told, done(process)]


def routed(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same of a mixture: in step n a balance loss of 4 + n / 10, a z loss of n / 10, 100 n assignments without room."""
    return [
        {**r, "balance_loss": 4 + r["step"] / 10, "z_loss": r["step"] / 10, "dropped_tokens": 100 * r["step"]}
        if r["kind"] == "step"
        else r
        for r in told
    ]


def staged(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same of a pipeline: in step n a bubble of n / 10, so that the median of the timed ones, 3 to 6, is 0.45."""
    return [{**r, "bubble_share": r["step"] / 10} if r["kind"] == "step" else r for r in told]


def done(process: int = 0, total: int = 1_000) -> dict[str, Any]:
    """The last record of a process."""
    parts = {"startup": 3.0, "compile": 4.0, "untimed_steps": 6.0, "timed_steps": 1.0, "evaluation": 0.5}
    return {
        "kind": "done",
        "process": process,
        "bytes_per_device": {"total": total, "parameters": total - 100, "temporaries": 100},
        "resident_bytes": 5_000,
        "cpu_time_per_step_s": 0.5,
        "compilations": 1,
        "layouts": {"embed.tokens": [["tensor"], ["fsdp"]]},
        "layouts_equal_plan": True,
        "device_facts": {"platform": "cpu", "kind": "cpu", "count": 8},
        "corpus": {"sha256": "c0ffee"},
        "time_parts_s": {**parts, "checkpoint": 0.0, "other": 0.25},
    }


def environment(**changed: Any) -> dict[str, Any]:
    """What `results.environment` would say on a small machine."""
    facts = dict.fromkeys(("python", "versions", "platform", "devices", "git", "command"))
    return {**facts, "cpu": {"model": "a processor", "usable_cores": 2}, "simulated": True, **changed}


def result(choices: dict[str, Any] | None = None, **facts: Any) -> dict[str, Any]:
    """The result of the sample job; `choices` as for `experiment`, `facts` replace those of `Facts`."""
    asked = experiment(**(choices or {}))
    given: dict[str, Any] = {
        "run_id": "a-run",
        "experiment": asked,
        "plan": make_plan(asked, FOUND),
        "environment": environment(),
        "records": records(),
        "wall_time_s": 20.0,
        "coordinator_startup_s": 2.0,
        "peak": DevicePeak("float32", PEAK, 2 * PEAK, "a published number", None),
    }
    return build(Facts(**{**given, **facts}))


def run_folder(path: Path, **choices: Any) -> Path:
    """A folder on disk that holds the sample job's result."""
    from scaling_lab.results.folder import RunFolder

    RunFolder.create(path).write_result(result(choices))
    return path
