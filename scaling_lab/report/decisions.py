"""What was decided, shown before a run starts: mesh, roles, bytes, batch, numbers with their arithmetic. Decides nothing."""

from __future__ import annotations

import math

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scaling_lab.models import decoder
from scaling_lab.plan.experiment import Experiment
from scaling_lab.plan.plan import Plan
from scaling_lab.report.drawing import draw_mesh
from scaling_lab.report.units import count, percent, plural, scaled, size


def decisions(experiment: Experiment, plan: Plan) -> Group:
    """Everything decided, ready to print on any console."""
    return Group(
        Text(heading(experiment, plan)),
        Padding(Text(draw_mesh(plan.mesh), no_wrap=True, overflow="ignore"), (1, 2)),
        Padding(_axes(plan), (0, 2)),
        Padding(_numbers(experiment, plan), (1, 2, 0, 2)),
    )


def heading(experiment: Experiment, plan: Plan) -> str:
    """One line: model, table, backend, devices."""
    devices = f"{plan.mesh.devices:,} {'simulated ' if plan.simulated else ''}{plan.platform} device"
    devices += "" if plan.mesh.devices == 1 else "s"
    hosts = f" on {plural(plan.mesh.hosts, 'host')}" if plan.mesh.hosts > 1 else ""
    return f"{experiment.model.name}, table {experiment.sharding.name}, {experiment.backend.name}, {devices}{hosts}"


def _axes(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("axis", "size", "role, as the table reads"):
        table.add_column(title)
    if plan.mesh.hosts > 1:
        table.add_column("crosses hosts")
    crossing = plan.mesh.crossing_axes()
    for axis, roles in plan.roles.items():
        chosen = " (auto)" if axis in plan.mesh.chosen else ""
        row = [axis, f"{plan.mesh.size(axis)}{chosen}", ", ".join(roles)]
        table.add_row(*row, *(["yes" if axis in crossing else "no"] if plan.mesh.hosts > 1 else []))
    if not plan.roles:
        table.add_row("none", "1", "a single device: nothing is divided")
    return table


def _numbers(experiment: Experiment, plan: Plan) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, text in number_lines(experiment, plan):
        table.add_row(name, text)
    return table


def number_lines(experiment: Experiment, plan: Plan) -> list[tuple[str, str]]:
    """The derived numbers, each with its arithmetic."""
    workload = experiment.workload
    tokens = workload.global_batch * workload.sequence
    per_step = plan.flops_per_token * tokens
    return [
        ("parameters", _parameters(experiment, plan)),
        ("bytes per device", _bytes(plan)),
        ("hardware", _hardware(experiment, plan)),
        ("batch", _batch(plan)),
        *([("pipeline", _pipeline(plan))] if plan.pipeline.stages > 1 else []),
        ("tokens per step", f"{workload.global_batch} rows x {workload.sequence} tokens = {count(tokens)}"),
        ("FLOPs per token", _flops(experiment, plan)),
        ("FLOPs per step", f"{scaled(plan.flops_per_token)} x {count(tokens)} tokens = {scaled(per_step, 'FLOP')}"),
        ("processes", f"{plan.processes} x {plural(plan.devices_per_process, 'device')} ({experiment.backend.processes})"),
        ("steps", _steps(experiment)),
    ]


def _parameters(experiment: Experiment, plan: Plan) -> str:
    text = f"{count(plan.parameter_count)} ({experiment.workload.precision.params})"
    padded = sum(math.prod(p.shape) for p in decoder.parameters(experiment.model))
    if padded > plan.parameter_count:
        text += f", {count(padded)} with the vocabulary padded to {count(experiment.model.padded_vocab)}"
    if experiment.model.moe is None:
        return text
    return f"{text}, of which a token uses {count(decoder.active_size(experiment.model))}"


def _bytes(plan: Plan) -> str:
    parts = [f"{name} {size(value)}" for name, value in plan.bytes_per_device.items() if name != "total" and value]
    return f"{' + '.join(parts)} = {size(plan.bytes_per_device['total'])}, by arithmetic"


def _hardware(experiment: Experiment, plan: Plan) -> str:
    """What it is called, and how much of its memory the plan leaves."""
    named, memory, planned = experiment.hardware.name, plan.memory_bytes_per_device, plan.bytes_per_device["total"]
    name = named if named == plan.platform else f"{named} ({plan.platform})"
    if memory is None:
        return f"{name}: memory unknown"
    return f"{name}: {size(memory)} a device, {percent(planned / memory)} planned, {size(memory - planned)} left"


def _batch(plan: Plan) -> str:
    batch = plan.batch
    over = " x ".join(f"{axis} {plan.mesh.size(axis)}" for axis in batch.axes)
    rows = f"{plural(batch.accumulation, 'microbatch')} of {plural(batch.microbatch, 'row')}"
    return f"{rows} / {batch.parts} ({over}) = {plural(batch.rows_per_part, 'row')} a device" if over else f"{rows}, not split"


def _pipeline(plan: Plan) -> str:
    """Stages and their layers, the schedule, the bubble, and where the rest of the model lives."""
    split = plan.pipeline
    layers = " | ".join(", ".join(_range(chunk) for chunk in split.of_stage(stage)) for stage in range(split.stages))
    padding = sum(layer is None for layer in split.slots)
    if padding and split.one_program:
        layers += f" (and {plural(padding, 'masked layer')} of padding)"
    outside = "on every stage"
    if not split.one_program:
        outside = f"on stage 0 and stage {split.stages - 1}"
    elif split.spread:
        outside = "on every stage, which share their rows"
    work = split.microbatches * split.virtual_stages
    return (
        f"{split.stages} stages of layers {layers}; {split.schedule}, {plural(split.microbatches, 'microbatch')}: bubble "
        f"{split.waits} / ({work} + {split.waits}) = {percent(split.bubble_share)}; embedding and head {outside}"
    )


def _range(layers: range) -> str:
    return f"{layers.start}" if len(layers) == 1 else f"{layers.start}-{layers.stop - 1}"


def _flops(experiment: Experiment, plan: Plan) -> str:
    """6 per multiplied parameter, and full attention; see `models.decoder.flops_per_token`."""
    model, sequence = experiment.model, experiment.workload.sequence
    sizes = f"{model.head_dim}"
    if model.latent:
        sizes = f"({model.latent.nope_dim + model.latent.rope_dim} + {model.latent.value_dim}) / 2"
    active = "multiplied" if model.moe is None else "multiplied (active)"
    arithmetic = (
        f"6 x {count(decoder.multiplied_size(model))} {active} parameters + 12 x {plural(model.layers, 'layer')} x "
        f"{plural(model.heads, 'head')} x {sizes} x {sequence} tokens"
    )
    return f"{arithmetic} = {scaled(plan.flops_per_token)} (half of the attention: {scaled(plan.flops_per_token_causal)})"


def _steps(experiment: Experiment) -> str:
    workload = experiment.workload
    tokens = workload.steps * workload.global_batch * workload.sequence
    untimed = {0: "all timed", 1: "the first untimed"}.get(
        workload.untimed_steps, f"the first {workload.untimed_steps} untimed"
    )
    text = f"{count(workload.steps)}, {untimed}; {scaled(tokens)} tokens in all"
    every = workload.evaluation.every
    return f"{text}; evaluated every {every} steps and at the end" if every else text
