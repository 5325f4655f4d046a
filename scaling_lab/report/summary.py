"""One finished run as one table, and a failed one as one message. Reads a result; computes no metric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from scaling_lab.report.units import count, decimal, percent, plural, scaled, seconds, size
from scaling_lab.results.metrics import Result, at, values


def summary(result: Result, folder: Path) -> Table:
    """The table that ends a run."""
    table = Table(title=title(result), title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in summary_lines(result, folder):
        table.add_row(name, text)
    return table


def title(result: Result) -> str:
    """What ran, and on what: simulated devices are named as such before any speed is."""
    experiment = result["experiment"]
    devices = at(result, "plan.devices")
    what = f"{experiment['model']['name']}, table {experiment['sharding']['name']}, {experiment['backend']['name']}"
    return what if devices is None else f"{what}, {plural(devices, device_words(result))}"


def device_words(result: Result) -> str:
    """`simulated device` or `cpu device`, `gpu device`..."""
    platform = at(result, "environment.devices.platform") or ""
    return "simulated device" if at(result, "environment.simulated") else f"{platform} device".strip()


def summary_lines(result: Result, folder: Path) -> list[tuple[str, str]]:
    """The rows of the table: a name and what is known, with how it was found."""
    found = values(result)
    steps = at(result, "measured.step_time_distribution_s.count") or 0
    lines = [
        ("loss", f"{decimal(found['loss'])} after {plural(at(result, 'measured.steps') or 0, 'step')} (nats per token)"),
        ("validation loss", _validation(result)),
        ("gradient norm", decimal(found["grad_norm"])),
        *_routers(result, found),
        ("tokens/s", f"{count(found['tokens_per_s'])} ({count(found['tokens_per_s_per_device'])} per device)"),
        ("step time", _step_time(found, steps)),
        *_bubble(result),
        ("MFU", _mfu(result, found)),
        *_stale_peak(result, found["mfu"]),
        *_rematerialized(result),
        ("memory per device", memory_words(result)),
        ("compile time", _compile(found)),
        (
            "start-up time",
            f"{seconds(found['startup_s'])}; first step {seconds(found['first_step_s'])} after the command",
        ),
        ("wall time", wall_words(result)),
        ("devices", _devices(result)),
        ("run folder", str(folder)),
    ]
    tracked = at(result, "tracking.url") or at(result, "tracking.folder")
    return [*lines, ("W&B run", str(tracked))] if tracked else lines


def _validation(result: Result) -> str:
    evaluations = at(result, "measured.evaluation")
    if not evaluations:
        return "- (not evaluated)"
    last = evaluations[-1]
    return f"{decimal(last['loss'])} at step {last['step']}, over {count(last['tokens'])} tokens"


def _routers(result: Result, found: dict[str, Any]) -> list[tuple[str, str]]:
    """What routers report, of a model that has some."""
    if found["balance_loss"] is None:
        return []
    mixtures = at(result, "experiment.model.layers") - at(result, "experiment.model.moe.dense_layers")
    losses = f"balance loss {decimal(found['balance_loss'], 4)} ({mixtures} when even), z loss {decimal(found['z_loss'], 4)}"
    dropped = f"dropped {count(found['dropped_tokens'])} assignments, {percent(found['dropped_fraction'])} in all steps"
    return [("routers", f"{losses}, {dropped}")]


def _step_time(found: dict[str, Any], steps: int) -> str:
    if not steps:
        return "- (no timed step)"
    spread = f"p10 {seconds(found['step_time_p10_s'])}, p90 {seconds(found['step_time_p90_s'])}"
    return f"{seconds(found['step_time_s'])} median, {spread}, {plural(steps, 'timed step')}"


def _bubble(result: Result) -> list[tuple[str, str]]:
    """Of a pipeline: how long its stages had nothing to do, beside what arithmetic says."""
    if not at(result, "plan.pipeline"):
        return []
    planned = f"planned {percent(at(result, 'plan.pipeline.bubble_share'))}"
    found = at(result, "measured.bubble_share")
    if found is None:
        return [("pipeline bubble", f"- (not measured); {planned}")]
    how = "by processor time, as if no stage shared a core" if at(result, "environment.simulated") else "by the clock"
    return [("pipeline bubble", f"{percent(found)} of the schedule ({how}); {planned}")]


def _mfu(result: Result, found: dict[str, Any]) -> str:
    source = at(result, "environment.peak.source") or "unknown"
    if found["mfu"] is None:
        return f"- (peak {source})"
    peak = scaled(at(result, "environment.peak.flops_per_s_per_device"), "FLOP/s")
    own = found["mfu_of_library"]
    library = "" if own is None else f"; {percent(own)} of what {result['experiment']['backend']['name']} itself reaches"
    causal = f"{percent(found['mfu_causal'])} counting half of the attention"
    return f"{percent(found['mfu'])} ({causal}) of {peak}: {source}{library}"


def _stale_peak(result: Result, mfu: float | None) -> list[tuple[str, str]]:
    cache, load = at(result, "environment.peak.machine.cache"), at(result, "environment.peak.machine.load")
    if mfu is None or mfu <= 1 or not cache:
        return []
    return [("peak", f"too low: it was measured while the machine was busy (load {load}); delete {cache} to measure it again")]


def _rematerialized(result: Result) -> list[tuple[str, str]]:
    times = at(result, "compiled.involuntary_rematerializations")
    if not times:
        return []
    text = f"gathered a whole tensor only to cut it anew {plural(times, 'time')}, which costs speed: worker-0.log says which"
    return [("partitioner", text)]


def memory_words(result: Result) -> str:
    """Measured bytes where the platform can say, else the plan's; and how much the processes had resident."""
    found, planned = at(result, "measured.bytes_per_device") or {}, at(result, "plan.bytes_per_device.total")
    parts = ", ".join(f"{name} {size(value)}" for name, value in found.items() if name != "total" and value)
    known = f"{size(found['total'])} ({parts})" if parts else size(found.get("total"))
    resident = at(result, "measured.resident_bytes")
    held = "" if resident is None else f"; {size(resident)} resident in all processes"
    return f"{known}; planned {size(planned)}{held}"


def _compile(found: dict[str, Any]) -> str:
    times = found["compilations"]
    if found["compile_s"] == 0:
        return "- (eager: nothing was compiled)"
    return seconds(found["compile_s"]) + ("" if times is None else f", {plural(times, 'compilation')} of the train step")


def wall_words(result: Result) -> str:
    """The wall time and its parts."""
    parts = at(result, "measured.time_parts_s") or {}
    named = ", ".join(f"{name.replace('_', ' ')} {seconds(value)}" for name, value in parts.items() if value)
    return f"{seconds(at(result, 'measured.wall_time_s'))} = {named}" if named else seconds(at(result, "measured.wall_time_s"))


def _devices(result: Result) -> str:
    devices, cpu = at(result, "plan.devices"), at(result, "environment.cpu") or {}
    if at(result, "environment.simulated"):
        where = f"{cpu.get('model')}, {cpu.get('usable_cores')} cores"
        return f"{devices} simulated, sharing one processor ({where}): speed says nothing about {devices} real devices"
    kind = at(result, "environment.devices.kind") or at(result, "environment.devices.platform") or "unknown"
    return f"{devices} real: {kind}"


def failure_text(result: Result, folder: Path | None = None) -> str:
    """A failed or infeasible run as one message."""
    error = result["error"] or {"message": "no reason is known"}
    where = "" if folder is None else f"\nrun folder: {folder}"
    return f"{result['status']}: {error['message']}{where}"
