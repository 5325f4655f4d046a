"""A session: one experiment in one process, trained as its plan says. Owns the order of a step; each part has its own module."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from scaling_lab.backends.contract import Batch, Job
from scaling_lab.backends.torch import ddp, fsdp, runtime, stages, weights
from scaling_lab.backends.torch.loss import IGNORED
from scaling_lab.backends.torch.moe import REPORTED
from scaling_lab.backends.torch.optimizer import make_optimizer, scale_gradients, set_learning_rate, square_sum, state_bytes
from scaling_lab.backends.torch.reduce import buckets_of, take_gradients
from scaling_lab.backends.torch.sharding import Placement, check_supported
from scaling_lab.backends.torch.transformer import Decoder
from scaling_lab.plan.layout import Layout
from scaling_lab.plan.schedule import learning_rate


def _pipeline(decoders: list[Decoder], on: Placement) -> Any:
    from scaling_lab.backends.torch.pipeline import Pipeline  # torch's takes a second to import

    return Pipeline(decoders, on)


def open_session(job: Job) -> TorchSession:
    """Join the other processes, make the weights and the optimizer. Raises WorkerError where the device is not the planned one."""
    runtime.check_planned(job.plan)
    check_supported(job.experiment, job.plan)
    world = runtime.join(job)
    try:
        return TorchSession(job, world)
    except BaseException:
        runtime.leave(world)
        raise


@dataclass(frozen=True)
class Read:
    """A step that was handed to the device: numbers known already, and those (float64) still to be read from it."""

    known: dict[str, float]
    device: dict[str, Tensor]

    def result(self) -> dict[str, float]:
        """Wait until the device is done and read the numbers."""
        if any(x.is_cuda for x in self.device.values()):
            torch.cuda.synchronize()
        return {**{name: x.item() for name, x in self.device.items()}, **self.known}


class TorchSession:
    """See `contract.Session`."""

    def __init__(self, job: Job, world: runtime.World):
        experiment = job.experiment
        self.job, self.world = job, world
        self.on = on = Placement(job.plan, experiment.workload.precision, world, job.process)
        stages.meet(on)
        self.decoders = [Decoder(experiment, on, chunk) for chunk in on.chunks]
        reshard = bool(experiment.backend.reshard_after_forward)
        self.sums = experiment.backend.data_parallel if world.mesh else "buckets"  # a single device has nothing to sum
        whole = self.sums == "fully_shard"
        self.wrapped = [one for one in self.decoders if fsdp.wrap(one, one.every_layer(), on, reshard=reshard, whole=whole)]
        for decoder in self.decoders:
            decoder.to_empty(device=world.device)
        self.pieces = [piece for decoder in self.decoders for piece in weights.pieces_of(decoder, on)]
        with torch.no_grad():
            weights.place_initial(self.pieces, on, experiment.workload.seed)
        self.model = ddp.wrapped(self.decoders[0]) if self.sums == "ddp" else self.decoders[0]
        self.pipeline = None if job.plan.pipeline.stages == 1 else _pipeline(self.decoders, on)
        self.buckets = buckets_of(self.pieces, on, summed=self.sums != "buckets")
        self.in_buckets = [piece for bucket in self.buckets for piece in bucket.pieces]
        self.stepped = [x for bucket in self.buckets for x in bucket.stepped]
        self.optimizer = make_optimizer(experiment.workload.optimizer, self.in_buckets, self.stepped)
        counted = [piece.counts(on) for piece in self.in_buckets]
        self.counted = torch.tensor(counted, dtype=torch.float64, device=world.device)
        moe = experiment.model.moe
        self.coefficients = (moe.balance_loss, moe.z_loss, 0.0) if moe else ()  # of what routers report
        split = job.plan.pipeline  # whose last stage has the losses
        self.counts_tokens = on.first_along_others((*job.plan.rules.divided_axes, *split.axes)) and on.stage == split.stages - 1
        self.steps_done = 0
        if experiment.backend.compile:
            for decoder in self.decoders:
                decoder.compile_parts()

    def prepare(self, batch: Batch) -> float:
        """Run the step once without its update where layers are compiled; eager layers have nothing to prepare."""
        if not self.job.experiment.backend.compile:
            return 0.0
        started = time.perf_counter()
        self._sums(batch)
        for piece in self.pieces:
            piece.parameter.grad = None
        return time.perf_counter() - started

    def step(self, batch: Batch) -> Read:
        """Accumulate, reduce, clip, update."""
        workload = self.job.experiment.workload
        totals, gradients = self._reduced(batch)
        lr = learning_rate(workload.optimizer, workload.steps, self.steps_done)
        with torch.no_grad():
            scale_gradients(gradients, totals["grad_norm"], totals["valid_tokens"].clamp(min=1), workload.optimizer.clip)
            set_learning_rate(self.optimizer, lr)
            for stepped, gradient in zip(self.stepped, gradients, strict=True):
                stepped.grad = gradient
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            for bucket in self.buckets:
                bucket.gather()
        self.steps_done += 1
        return Read({"lr": lr}, totals)

    def prepare_evaluation(self, batch: Batch) -> float:
        """Run it once where layers are compiled: without gradients they are compiled anew."""
        if not self.job.experiment.backend.compile:
            return 0.0
        started = time.perf_counter()
        self.evaluate(batch).result()
        return time.perf_counter() - started

    def evaluate(self, batch: Batch) -> Read:
        """Loss of one batch with the present weights."""
        with torch.no_grad():
            totals = self._total(self._sums(batch, backward=False))
        for decoder in self.wrapped:
            decoder.reshard()  # type: ignore[operator]
        return Read({}, {name: totals[name] for name in ("loss_sum", "valid_tokens")})

    def compilations(self) -> int | None:
        """torch compiles layers, not the step: no count."""
        return None

    def layouts(self) -> dict[str, Layout]:
        """Read from the tensors."""
        return stages.joined_layouts(weights.layouts(self.pieces, self.on), self.pieces, self.on)

    def bytes_per_device(self) -> dict[str, int | None]:
        """GPU: the allocator's peaks. CPU: what can be counted of live tensors; activations and so the total are unknown."""
        parameters = weights.local_bytes(piece.parameter for piece in self.pieces)
        copies = sum(bucket.buffer.numel() * bucket.buffer.element_size() for bucket in self.buckets if bucket.way.split)
        parts = {
            "parameters": parameters + copies,
            "gradients": weights.local_bytes(self.stepped),
            "optimizer": state_bytes(self.optimizer),
        }
        if self.world.device.type != "cuda":
            return {"total": None, **parts}
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return {"total": peak, **parts, "allocated_peak": peak, "reserved_peak": reserved}

    def device_facts(self) -> dict[str, Any]:
        """See `runtime.device_facts`."""
        return runtime.device_facts(self.world)

    def gradients(self, batch: Batch) -> tuple[dict[str, float], Mapping[str, np.ndarray]]:
        """Metrics, and the gradient of the loss for each parameter, whole; nothing is updated."""
        totals, gradients = self._reduced(batch)
        count = totals["valid_tokens"].clamp(min=1)
        means = [(gradient.double() / count).float() for gradient in gradients]
        own = weights.gather(tuple(self.in_buckets), means, "optimizer", self.on)
        return Read({}, totals).result(), stages.joined(own, self.on)

    def weights(self) -> Mapping[str, np.ndarray]:
        """Every parameter, whole."""
        own = weights.gather(tuple(self.pieces), [piece.local for piece in self.pieces], "weights", self.on)
        return stages.joined(own, self.on)

    def replica_digests(self) -> dict[str, str]:
        """See `weights.digests`."""
        return weights.digests(self.pieces, self.on)

    def close(self) -> None:
        """Leave the process group, if this session made it."""
        runtime.leave(self.world)

    def _reduced(self, batch: Batch) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Metrics of the global batch, and each stepped tensor's gradient of what is minimised, times the valid tokens."""
        sums = self._sums(batch)
        with torch.no_grad():
            taken = iter(take_gradients(self.in_buckets, self.on))
            gradients = [g for bucket in self.buckets for g in bucket.reduce([next(taken) for _ in bucket.pieces])]
            stages.sum_shared(self.in_buckets, gradients, self.on)
            times = self.pipeline.stopwatch.summands() if self.pipeline else {}
            totals = self._total(sums, squares=square_sum(gradients, self.counted), **times)
            bubble = self.pipeline.stopwatch.share(totals) if self.pipeline else {}
            divisor = totals["valid_tokens"].clamp(min=1)
            metrics = {"loss": totals.pop("loss_sum") / divisor, "grad_norm": totals.pop("squares").sqrt() / divisor}
            rows = self.job.experiment.workload.global_batch
            losses = {name: totals[name] / rows for name in totals if name.endswith("_loss")}
            return {**metrics, **totals, **losses, **bubble}, gradients

    def _sums(self, batch: Batch, *, backward: bool = True) -> dict[str, Tensor]:
        """Sums over this process's rows, float64: losses, valid tokens and what routers report; with `backward`, gradients too."""
        if self.pipeline:
            self.pipeline.stopwatch.begin()
        own = self._own(batch)
        labels = own["labels"].masked_fill_(own["labels"] < 0, IGNORED)
        count = (labels != IGNORED).sum().double()
        scale = self._router_scale(count) if backward and any(self.coefficients) else None
        loss_sum, reported = (torch.zeros(size, dtype=torch.float64, device=self.world.device) for size in ((), len(REPORTED)))
        for microbatch in range(len(labels)):
            more = microbatch < len(labels) - 1
            rows = {name: x[microbatch] for name, x in own.items()}
            with ddp.unsynchronised(self.model) if backward and more and self.sums != "buckets" else nullcontext():
                run = self._run if self.pipeline is None else self.pipeline.run
                loss, router = run(rows, scale, backward=backward)
            loss_sum += loss.detach()
            reported += 0.0 if router is None else router.detach()
        routers = dict(zip(REPORTED, reported, strict=True)) if self.coefficients else {}
        return {"loss_sum": loss_sum, "valid_tokens": count, **routers}

    def _run(self, rows: dict[str, Tensor], scale: Tensor | None, *, backward: bool) -> tuple[Tensor, Tensor | None]:
        """Rows through the whole model: the sums of losses and of what routers report."""
        model = self.model if backward else self.decoders[0]
        loss, router = model(rows["tokens"], **{name: x for name, x in rows.items() if name != "tokens"})
        if backward:
            (loss if scale is None else loss + (router * scale).sum()).backward()
        return loss, router

    def _router_scale(self, count: Tensor) -> Tensor:
        """What multiplies the sums that routers report, so that with the losses' sum they make one sum to differentiate.

        Gradients are divided by the valid tokens of the global batch, but a router's losses are means over its rows: they are
        multiplied by that number here, in this process's backward pass already. A model without experts needs no such number
        before its step ends.
        """
        total = self._counted_once(count)
        if self.world.mesh is not None:
            dist.all_reduce(total)
        coefficients = torch.tensor(self.coefficients, dtype=torch.float64, device=count.device)
        return (coefficients * total.clamp(min=1) / self.job.experiment.workload.global_batch).float()

    def _own(self, batch: Batch) -> dict[str, Tensor]:
        """What of a batch this process computes, int64 [accumulation, rows, local sequence], by name."""
        arrays = {field.name: getattr(batch, field.name) for field in fields(batch)}
        own = {name: x[..., self.on.columns].astype(np.int64) for name, x in arrays.items() if x is not None}
        return {name: torch.from_numpy(x).to(self.world.device) for name, x in own.items()}

    def _counted_once(self, sums: Tensor) -> Tensor:
        """Sums over this process's tokens, as it adds them to those of others: tokens that several processes have count once."""
        return sums * float(self.counts_tokens)

    def _total(self, sums: dict[str, Tensor], **others: Tensor) -> dict[str, Tensor]:
        """Sums over all processes, in one collective."""
        local = torch.stack([*map(self._counted_once, sums.values()), *others.values()])
        if self.world.mesh is not None:
            dist.all_reduce(local)
        return dict(zip((*sums, *others), local, strict=True))
