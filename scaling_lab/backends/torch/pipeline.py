"""A step's way through the stages of a pipeline, on `torch.distributed.pipelining`: GPipe, 1F1B and interleaved 1F1B.

Owns the stages of this process and the schedule; how long they take: `bubble`. A stage is a `Decoder` with a chunk of the layers;
between stages travels each device's own part of the residual stream, and what routers have reported so far beside it. Losses are the
last stage's. What FSDP stores torch's stages gather, in `gpipe` for every forward pass and then once, in `1f1b` once a microbatch
(a backward pass leaves it gathered, a forward one frees it), in `interleaved` once; they reduce gradients once, after the last
backward pass. Imported only where there is a pipeline: torch's takes long to import.

Over gloo torch's batches of messages are plain sends and receives, one after the other, which both sides order alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from scaling_lab.backends.torch.bubble import Stopwatch, elapsed_name, pass_name
from scaling_lab.backends.torch.moe import REPORTED
from scaling_lab.backends.torch.sharding import RESIDUAL, Placement, local_of
from scaling_lab.backends.torch.transformer import Decoder

SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


class Stage(PipelineStage):
    """torch's stage, which times its passes."""

    stopwatch: Stopwatch

    def forward_maybe_with_nosync(self, x: Tensor, *reported: Tensor, **others: Any) -> tuple[Tensor, ...]:
        """The decoder's pass of what has come, and what goes on: plain tensors only."""
        x = x if self.is_first else cast(Decoder, self.submod).on.assembled(x, RESIDUAL)
        x, *more = super().forward_maybe_with_nosync(x, *reported, **others)
        return local_of(x).contiguous(), *(reported for reported in more if reported is not None)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of a microbatch; its input has come."""
        work = partial(super().forward_one_chunk, *args, **kwargs)
        return self.stopwatch.taken(pass_name(self.stage_index, "F"), work)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        """The backward pass of a microbatch."""
        work = partial(super().backward_one_chunk, *args, **kwargs)
        self.stopwatch.taken(pass_name(self.stage_index, "B"), work)


class Pipeline:
    """The stages on this process's device."""

    def __init__(self, decoders: Sequence[Decoder], on: Placement):
        split = on.plan.pipeline
        self.on, self.stopwatch = on, Stopwatch(on)
        self.scale: Tensor | None = None
        group = on.group(split.axes)
        self.stages = [_stage(decoder, chunk, on, group) for decoder, chunk in zip(decoders, on.chunks, strict=True)]
        for stage in self.stages:
            stage.stopwatch = self.stopwatch
        stages = self.stages if split.schedule == "interleaved" else self.stages[0]
        # Losses are sums, and so are gradients.
        self.schedule = SCHEDULES[split.schedule](stages, split.microbatches, loss_fn=self._minimised, scale_grads=False)

    def run(self, own: dict[str, Tensor], scale: Tensor | None, *, backward: bool) -> tuple[Tensor, Tensor | None]:
        """The rows of a device through all stages: the sums of losses and of what routers report, zero but on the last stage.

        own: int64 (b, t) by name; scale: what multiplies what routers report in the sum that is differentiated, if it takes part
        """
        self.scale = scale
        self.loss_sum, self.reported = (torch.zeros(n, dtype=torch.float64, device=self.on.device) for n in ((), len(REPORTED)))
        tokens, others = own["tokens"], {name: x for name, x in own.items() if name != "tokens"}
        pass_through = self.schedule.step if backward else self.schedule.eval
        first = (tokens,) if self.on.stage == 0 else ()
        work = partial(pass_through, *first, target=own["labels"], return_outputs=False, **others)
        self.stopwatch.taken(elapsed_name(self.on.stage), work)
        return self.loss_sum, self.reported

    def _minimised(self, output: tuple[Tensor, ...], _labels: Tensor) -> Tensor:
        """What is differentiated of a microbatch on the last stage, whose decoder has computed the loss already."""
        loss, *reported = output
        self.loss_sum += loss.detach()
        for more in reported:
            self.reported += more.detach()
            loss = loss if self.scale is None else loss + (more * self.scale).sum()
        return loss


def _stage(decoder: Decoder, chunk: int, on: Placement, group: dist.ProcessGroup) -> Stage:
    """A stage whose inputs and outputs torch need not find out by trying."""
    split, mesh = on.plan.pipeline, on.plan.mesh
    rows, length = on.plan.batch.rows_per_part // split.microbatches, on.plan.sequence.length
    layout = on.plan.rules.activation_layout(RESIDUAL)
    embed = decoder.experiment.model.embed
    local = layout.local_shape((rows * mesh.split(layout.dims[0]), length, embed), mesh)

    def like(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)

    reported = (like((len(REPORTED),), torch.float32),) if decoder.experiment.model.moe else ()
    between = (like(local, on.compute_dtype), *reported)
    tokens = like((rows, len(range(*on.columns.indices(length)))), torch.int64)
    return Stage(
        decoder,
        chunk,
        len(split.chunks),
        on.device,
        input_args=(tokens,) if decoder.first else between,
        output_args=(like((), torch.float32), *reported) if decoder.last else between,
        group=group,
    )
