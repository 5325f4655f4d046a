"""How the layers split over devices: pipeline stages, which layers each has, its microbatches and its bubble. Pure arithmetic.

The layers are cut into stages x virtual_stages chunks of consecutive layers, as even as can be, longer ones first; chunk c belongs to
stage c % stages. Every chunk is stored with room for the longest one, so that all stages are alike: room without a layer is padding.
Must not know how a stage computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from scaling_lab.errors import PlanError
from scaling_lab.models.model import Model
from scaling_lab.models.parameters import Parameter
from scaling_lab.plan.experiment import Experiment, Pipeline
from scaling_lab.plan.mesh import Mesh
from scaling_lab.plan.rules import Rules

#: How many microbatches a stage gets where the workload does not say, by number: the first that divides its rows.
USUAL_PER_STAGE = (4, 2, 1)


@dataclass(frozen=True)
class PipelineSplit:
    """The split of the layers over the mesh axes of the table's `layers` row.

    axes: those larger than 1, one at most; layers: of the model, numbered from 0
    microbatches: into how many parts the rows of a device go through the stages, one after the other
    one_program: every stage runs the same program (JAX), so each holds what is outside the layers, and in the bubble computes what
    nobody wants; else (torch) the first stage holds what precedes the layers and the last what follows them
    spread, vocab_spread: outside the layers the stages share the rows; by turns, after the layers, the vocabulary; in one program
    """

    axes: tuple[str, ...]
    stages: int
    virtual_stages: int
    microbatches: int
    schedule: str
    layers: int
    one_program: bool = False
    spread: bool = False
    vocab_spread: bool = False

    @property
    def chunks(self) -> tuple[range, ...]:
        """The layers of each chunk, in the order of the model."""
        num = self.stages * self.virtual_stages
        size, longer = divmod(self.layers, num)
        starts = [chunk * size + min(chunk, longer) for chunk in range(num + 1)]
        return tuple(range(start, stop) for start, stop in itertools.pairwise(starts))

    @property
    def room(self) -> int:
        """For how many layers every chunk is stored."""
        return len(self.chunks[0])

    def of_stage(self, stage: int) -> tuple[range, ...]:
        """The layers of a stage's chunks, in their order."""
        return self.chunks[stage :: self.stages]

    @cached_property
    def slots(self) -> tuple[int | None, ...]:
        """The layer at each place of a stored stack, None where there is padding: stage by stage, of a stage chunk by chunk."""
        chunks = (chunk for stage in range(self.stages) for chunk in self.of_stage(stage))
        return tuple(slot for chunk in chunks for slot in (*chunk, *(None,) * (self.room - len(chunk))))

    @property
    def by_turns(self) -> bool:
        """Whether one program works forward and backward by turns, its backward pass written out."""
        return self.one_program and self.schedule == "1f1b"

    @property
    def waits(self) -> int:
        """For how many chunks' time a stage has nothing to do: stages - 1; by turns in one program, where both ways through the
        stages take as many ticks of a forward and a backward pass each, twice that."""
        return (self.stages - 1) * (2 if self.by_turns else 1)

    @property
    def bubble_share(self) -> float:
        """Share of a stage's time in which it has nothing to do, by arithmetic, where forward and backward passes of chunks take
        the same time on every stage: waits / (microbatches x virtual_stages + waits).

        Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2, whose bubble is over the ideal time, not over all of it.
        """
        return self.waits / (self.microbatches * self.virtual_stages + self.waits)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Of how many microbatches x chunks each stage holds activations at most.

        In one program: all, and those of the bubble, or by turns one (and inputs of 2 x stages - 1). Else `gpipe`: all;
        `1f1b`: one for each stage from it to the last; `interleaved`: 2 for each stage after it and stages x
        (virtual_stages - 1) + 1 beside, as that schedule warms up.
        """
        every = self.microbatches * self.virtual_stages
        if self.by_turns:
            return (1,) * self.stages
        if self.one_program:
            return (every + self.stages - 1,) * self.stages
        if self.schedule == "gpipe":
            return (every,) * self.stages
        after = range(self.stages - 1, -1, -1)
        if self.virtual_stages == 1:
            return tuple(min(every, n + 1) for n in after)
        return tuple(min(every, 2 * n + self.stages * (self.virtual_stages - 1) + 1) for n in after)

    @property
    def logits_in_flight(self) -> int:
        """Of how many microbatches the last stage holds logits at most: by turns, a loss goes straight into its backward pass."""
        return self.microbatches if self.schedule == "gpipe" else 1

    def stored(self, parameter: Parameter) -> Parameter:
        """A parameter as it is stored: a stack with room for padding."""
        if not parameter.stacked or self.stages == 1:
            return parameter
        return replace(parameter, shape=(len(self.slots), *parameter.shape[1:]), used=parameter.used_shape)

    def holders(self, parameter: Parameter, model: Model) -> tuple[int, ...]:
        """The stages that hold any of a parameter."""
        if parameter.stacked or self.one_program:
            return tuple(range(self.stages))
        last = self.stages - 1
        if parameter.role != "embedding":
            return (last,)
        tied = model.tied_head and "vocab" in parameter.axes
        return (0, last) if tied and last else (0,)


def split(experiment: Experiment, rules: Rules, mesh: Mesh) -> PipelineSplit:
    """The split. Raises PlanError where a number does not divide, as `faults` says."""
    for fault in faults(experiment, rules, mesh):
        raise PlanError(fault)
    axes = mesh.larger(rules.weights["layers"])
    stages, asked, layers = mesh.split(axes), experiment.workload.pipeline, experiment.model.layers
    if stages == 1:
        return PipelineSplit((), 1, 1, 1, "gpipe", layers)
    rows, one_program = _rows(experiment, rules, mesh), experiment.backend.name == "jax"
    microbatches, spread = asked.microbatches or _usual(rows, stages), one_program and rows is not None and rows % stages == 0
    whole = experiment.model.padded_vocab // mesh.split(mesh.larger(rules.activations["vocab"]))
    shared = one_program and asked.schedule == "1f1b" and whole % stages == 0
    return PipelineSplit(axes, stages, _chunks(asked), microbatches, asked.schedule, layers, one_program, spread, shared)


def faults(experiment: Experiment, rules: Rules, mesh: Mesh) -> Iterator[str]:
    """Why the layers and their microbatches do not split; nothing where they do or where there are no stages."""
    axes = mesh.larger(rules.weights["layers"])
    stages, model, asked = mesh.split(axes), experiment.model, experiment.workload.pipeline
    if stages == 1:
        return
    if len(axes) > 1:
        yield f"sharding.weights.layers names {', '.join(axes)}: one axis larger than 1 makes the stages. Set mesh.{axes[1]}=1."
        return
    sizes = f"mesh.{axes[0]}={stages}"
    if model.moe and model.moe.dense_layers:
        yield (
            f"model.moe.dense_layers={model.moe.dense_layers} with {sizes}: the layers of a pipeline's stages must all be of one "
            f"kind. Set model.moe.dense_layers=0 or mesh.{axes[0]}=1."
        )
    if (data_parallel := experiment.backend.data_parallel) in ("ddp", "fully_shard"):
        yield (
            f"backend.data_parallel={data_parallel} with {sizes}: it sums the gradients of a whole model, a process has a stage of it. "
            f"Set backend.data_parallel=buckets or mesh.{axes[0]}=1."
        )
    if model.moe and asked.schedule == "1f1b" and experiment.backend.name == "jax":
        yield (
            "workload.pipeline.schedule=1f1b with model.moe: in JAX its backward pass is written out without the routers' losses. "
            "Set workload.pipeline.schedule=gpipe or backend=torch."
        )
    yield from _schedule_faults(asked, stages, sizes)
    if model.layers < stages * (chunks := _chunks(asked)):
        virtual = "" if chunks == 1 else f" x workload.pipeline.virtual_stages={chunks}"
        yield (
            f"model.layers={model.layers} over {sizes}{virtual}: a stage would have no layer. "
            f"Set mesh.{axes[0]}={max(1, model.layers // chunks)} or model.layers={stages * chunks}."
        )
    yield from _microbatch_faults(experiment, stages, sizes, _rows(experiment, rules, mesh))


def _schedule_faults(asked: Pipeline, stages: int, sizes: str) -> Iterator[str]:
    if asked.schedule == "interleaved" and asked.virtual_stages == 1:
        yield "workload.pipeline.schedule=interleaved with one chunk a stage is 1f1b. Set workload.pipeline.virtual_stages=2."
    if asked.schedule != "interleaved" and _chunks(asked) > 1:
        yield (
            f"workload.pipeline.virtual_stages={asked.virtual_stages} needs schedule=interleaved, not {asked.schedule}. "
            f"Set workload.pipeline.virtual_stages=null or workload.pipeline.schedule=interleaved."
        )


def _microbatch_faults(experiment: Experiment, stages: int, sizes: str, rows: int | None) -> Iterator[str]:
    """rows: of a device, None where the batch does not split, which `plan.batch` says."""
    asked = experiment.workload.pipeline
    wanted, key = asked.microbatches, f"workload.pipeline.microbatches={asked.microbatches}"
    if not rows or (wanted is None and _usual(rows, stages)):
        return
    enough = experiment.workload.global_batch // rows * -(-rows // stages) * stages
    fitting = [n for n in range(1, rows + 1) if rows % n == 0 and not _groups_fault(asked.schedule, n, stages)]
    if wanted is None:
        largest = f", or workload.pipeline.microbatches={fitting[-1]}" if fitting else ""
        yield (
            f"{sizes}: the {rows} rows of a device do not divide into {stages} microbatches or a multiple, which would keep every "
            f"stage at work. Set workload.global_batch={enough}{largest}."
        )
        return
    near = min(fitting, key=lambda n: abs(n - wanted), default=None)
    change = f"workload.pipeline.microbatches={near}"
    if near is None:
        change = f"workload.pipeline.microbatches=null workload.global_batch={enough}"
    if rows % wanted:
        yield (
            f"{key} does not divide the {rows} rows of a device (workload.global_batch / workload.accumulation / what splits the "
            f"batch). Set {change}."
        )
    elif fault := _groups_fault(asked.schedule, wanted, stages):
        yield f"{key} with {sizes}: {fault}. Set {change}."


def _groups_fault(schedule: str, microbatches: int, stages: int) -> str | None:
    """Why a schedule does not take so many microbatches."""
    if schedule == "interleaved" and microbatches % stages:
        return f"interleaved stages take microbatches in groups of {stages}"
    if schedule == "1f1b" and microbatches < stages:
        return f"by turns {stages} stages need a microbatch each"
    return None


def _rows(experiment: Experiment, rules: Rules, mesh: Mesh) -> int | None:
    """Rows of one microbatch of accumulation on a device; None where they do not divide."""
    rows, left = divmod(
        experiment.workload.global_batch, experiment.workload.accumulation * mesh.split(rules.activations["batch"])
    )
    return None if left else rows


def _chunks(asked: Pipeline) -> int:
    """Chunks of a stage."""
    return asked.virtual_stages or (2 if asked.schedule == "interleaved" else 1)


def _usual(rows: int | None, stages: int) -> int:
    return next((n * stages for n in USUAL_PER_STAGE if rows and rows % (n * stages) == 0), 0)
