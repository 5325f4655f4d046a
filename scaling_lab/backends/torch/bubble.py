"""How long a pipeline's stages have nothing to do, by the times that their passes take. Must not know what a pass computes.

On devices of their own, by the clock on the wall: a stage is idle from the schedule's start to its end but for the passes of its
microbatches. Simulated devices share cores, so that most of that time is waiting for a core, which is no bubble: there the processor
time of the passes is measured, and put together in the order of the schedule, as if every stage had a core and messages took no time.
Planned stages are all alike; these differ, by their layers, and by the embedding and the head.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from scaling_lab.backends.torch.sharding import Placement
from scaling_lab.plan.pipeline import PipelineSplit

#: A pass of a microbatch through a chunk: the chunk, `F` (forward) or `B` (backward), the microbatch.
Pass = tuple[int, str, int]
KINDS = ("F", "B")


class Stopwatch:
    """The seconds of this process's passes since `begin`, by chunk and kind, and of the schedule from start to end."""

    def __init__(self, on: Placement):
        self.on = on
        self.order = [order(on.plan.pipeline, stage) for stage in range(on.plan.pipeline.stages)]
        #: None where passes are only dispatched in the host's time.
        self.clock: Callable[[], float] | None = None
        if on.device.type == "cpu":
            self.clock = time.thread_time if on.plan.simulated else time.perf_counter
        self.begin()

    def begin(self) -> None:
        """Forget earlier steps."""
        self.seconds = dict.fromkeys(_names(self.on), 0.0)

    def taken(self, name: str, work: Callable[[], object]) -> object:
        """What some work gives; the time that it took is added to that of others by this name."""
        started = self.clock() if self.clock else 0.0
        found = work()
        self.seconds[name] += self.clock() - started if self.clock else 0.0
        return found

    def summands(self) -> dict[str, Tensor]:
        """What is to be summed over all processes."""
        if self.clock is None:
            return {}
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in self.seconds.items()}

    def share(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """`bubble_share` of those sums, which are taken out of the others."""
        if self.clock is None:
            return {}
        split, plan = self.on.plan.pipeline, self.on.plan
        runs = plan.batch.accumulation * plan.mesh.devices // split.stages
        means = {name: sums.pop(name).item() / runs for name in _names(self.on)}
        chunks = range(len(split.chunks))
        each = {(chunk, kind): means[pass_name(chunk, kind)] / split.microbatches for chunk in chunks for kind in KINDS}
        # Stages begin together, and some are done before the others.
        longest = max(means[elapsed_name(stage)] for stage in range(split.stages))
        whole = makespan(self.order, each) if plan.simulated else longest
        busy = split.microbatches * sum(each.values())
        return {"bubble_share": torch.tensor(1 - busy / (split.stages * whole), dtype=torch.float64)}


def pass_name(chunk: int, kind: str) -> str:
    """The passes of a kind through a chunk."""
    return f"{kind} of chunk {chunk}"


def elapsed_name(stage: int) -> str:
    """The whole schedule, on a stage."""
    return f"schedule of stage {stage}"


def _names(on: Placement) -> list[str]:
    split = on.plan.pipeline
    passes = [pass_name(chunk, kind) for chunk in range(len(split.chunks)) for kind in KINDS]
    return [*passes, *(elapsed_name(stage) for stage in range(split.stages))]


def order(split: PipelineSplit, stage: int) -> list[Pass]:
    """The passes of a stage, as they follow in torch's schedules.

    As many forward ones as may be in flight, then one backward and one forward by turns. Chunks of a stage take microbatches in groups
    of as many as there are stages, later chunks first on the way back.
    """
    chunks = range(stage, len(split.chunks), split.stages)
    size = split.microbatches if len(chunks) == 1 else split.stages
    groups = [range(start, start + size) for start in range(0, split.microbatches, size)]
    forward = [(chunk, "F", n) for group in groups for chunk in chunks for n in group]
    backward = [(chunk, "B", n) for group in groups for chunk in reversed(chunks) for n in group]
    ahead = split.in_flight[stage]
    by_turns = itertools.zip_longest(backward, forward[ahead:])
    return [*forward[:ahead], *(one for pair in by_turns for one in pair if one)]


def makespan(order: Sequence[Sequence[Pass]], seconds: Mapping[tuple[int, str], float]) -> float:
    """When the last pass ends, if each begins when its stage is free and what it needs is there.

    order: the passes of each stage, as they follow; seconds: that a pass takes, by chunk and kind
    """
    last = max(chunk for passes in order for chunk, _, _ in passes)
    ended: dict[Pass, float] = {}
    free = [0.0] * len(order)
    ahead = [iter(passes) for passes in order]
    waiting: dict[int, Pass] = {stage: next(passes) for stage, passes in enumerate(ahead)}
    while waiting:
        ready = [stage for stage, one in waiting.items() if (need := _needed(one, last)) is None or need in ended]
        assert ready, f"no stage can go on: {waiting}"
        for stage in ready:
            one = waiting.pop(stage)
            need = _needed(one, last)
            free[stage] = ended[one] = max(free[stage], ended[need] if need else 0.0) + seconds[one[:2]]
            if following := next(ahead[stage], None):
                waiting[stage] = following
    return max(free)


def _needed(one: Pass, last: int) -> Pass | None:
    """The pass whose result another needs; None for the first chunk's forward passes. last: the number of the last chunk."""
    chunk, kind, microbatch = one
    if kind == "F":
        return (chunk - 1, "F", microbatch) if chunk else None
    return (chunk, "F", microbatch) if chunk == last else (chunk + 1, "B", microbatch)
