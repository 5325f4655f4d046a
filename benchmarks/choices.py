"""The README's table of choices worth comparing: every experiment of conf/experiment/ about one, really run, as Markdown.

    python benchmarks/choices.py [--steps 8] [--only remat scan]

Each row is one choice with everything else equal: median step times side by side, the processor time of a step (of all processes:
it tells more than a step's time where other jobs want the cores), memory of a device (JAX: state and temporaries of the compiled
step; torch: resident memory of all processes by their number) and compile times.
"""

import argparse
import os

from lab_run import machine, sweep

from scaling_lab.report.agreement import agreements
from scaling_lab.report.differences import value_text
from scaling_lab.report.units import seconds, size
from scaling_lab.results.metrics import at

BOTH = "backend=jax,torch"
#: Experiment -> what is chosen, and what the command adds.
CHOICES = {
    "partitioner": ("backend.partitioner",),
    "axis_types": ("backend.axis_types",),
    "module_library": ("backend.module",),
    "scan": ("backend.scan_layers",),
    "compiled_torch": ("backend.compile",),
    "data_parallel": ("backend.data_parallel",),
    "reshard": ("backend.reshard_after_forward",),
    "attention": ("backend.attention", BOTH),
    "remat": ("workload.remat", BOTH),
    "loss_chunks": ("workload.loss_chunks", BOTH),
    "context_parallel": ("workload.context.strategy", BOTH),
    "packing": ("data.pack", BOTH),
    "vocabulary": ("model.vocab_multiple", BOTH),
    "moe": ("model.moe.capacity_factor", BOTH),
    "pipeline": ("workload.pipeline.microbatches", BOTH),
    "pipeline_schedule": ("workload.pipeline.schedule",),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", nargs="+", default=list(CHOICES), choices=list(CHOICES))
    options = parser.parse_args()
    print("| experiment | where | step time | processor time | memory of a device | compile | same loss |")
    print("|---|---|---|---|---|---|---|")
    results = []
    for name in options.only:
        key, *words = CHOICES[name]
        results = sweep(
            f"experiment={name}",
            *words,
            workload__steps=options.steps,
            workload__untimed_steps=2,
            workload__evaluation__every=0,
        )
        for row in rows(name, key, results):
            print(row, flush=True)
    print(f"\n{machine(results[0])}, load {os.getloadavg()[0]:.1f} at the end; medians of {options.steps - 2} steps.")


def rows(name, key, results):
    """One row for each place in which the choice was made."""
    places = {}
    for result, agreement in zip(results, agreements(results), strict=True):
        places.setdefault(_place(result), []).append((_value(result, key), result, agreement))
    for place, found in places.items():
        cells = [_side_by_side(found, of) for of in (_step, _processor, _memory, _compile)]
        same = "yes" if all(a is not None and a.is_equal for _, _, a in found) else "no"
        yield f"| `{name}` | {place} | {' | '.join(cells)} | {same} |"


def _value(result, key):
    return "null" if at(result, f"experiment.{key}") is None else value_text(result, key)


def _place(result):
    mesh = " x ".join(f"{axis} {n}" for axis, n in (at(result, "plan.mesh") or {}).items() if n > 1)
    layers = at(result, "experiment.model.layers")
    table = at(result, "experiment.sharding.name")
    where = f"{table} ({mesh}, simulated)" if mesh else "one device"
    return f"{at(result, 'experiment.backend.name')}, {layers} layers, {where}"


def _side_by_side(found, of):
    told = [(value, of(result)) for value, result, _ in found]
    return ", ".join(f"{value}: {text}" for value, text in told) if any(text != "-" for _, text in told) else "-"


def _step(result):
    return seconds(at(result, "measured.step_time_s")) if result["status"] == "ok" else result["status"]


def _processor(result):
    return seconds(at(result, "measured.cpu_time_per_step_s"))


def _memory(result):
    total, resident = at(result, "measured.bytes_per_device.total"), at(result, "measured.resident_bytes")
    return size(total) if total or not resident else f"{size(resident / at(result, 'plan.devices'))} resident"


def _compile(result):
    taken = at(result, "measured.time_parts_s.compile")
    return seconds(taken) if taken else "-"


if __name__ == "__main__":
    main()
