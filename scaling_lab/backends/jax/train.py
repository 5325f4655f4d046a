"""The session of one experiment in JAX: the train step, compiled once ahead of time, and what the worker may ask about it.

Owns the order of a step (accumulate, reduce, clip, update) and its one compilation. Must not know clocks, files or data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scaling_lab.backends.contract import Batch, Job, Pending, Session
from scaling_lab.backends.jax import optimizer, runtime, sharding
from scaling_lab.backends.jax.loss import router_loss, router_metrics
from scaling_lab.backends.jax.products import gradient_dtype
from scaling_lab.backends.jax.sharding import Arrays, Placement
from scaling_lab.backends.jax.stacks import in_order
from scaling_lab.backends.jax.transformer import forward
from scaling_lab.errors import WorkerError
from scaling_lab.plan.experiment import Experiment
from scaling_lab.plan.layout import Layout
from scaling_lab.plan.schedule import learning_rate


def open_session(job: Job) -> Session:
    """Join the other processes and check the devices found against the plan (WorkerError if they differ)."""
    mesh = runtime.join(job)
    return JaxSession(job, Placement(mesh, job.plan, job.experiment.workload.precision))


def loss_and_gradients(experiment: Experiment, on: Placement) -> Callable[..., tuple[Arrays, Arrays]]:
    """A pure function (weights, batch by name [accumulation, rows, sequence]) -> (metrics, gradients).

    The loss is one quotient: the sum over all valid tokens by their number. What routers add is a mean over all rows. Both numbers
    are known before the first microbatch, so each one adds its share to metrics and gradients, and no factor of accumulation
    changes their sum.
    """
    apply = forward(experiment, on)
    dtype = gradient_dtype(experiment.workload.precision)

    def share(weights: Arrays, batch: Arrays, tokens: jax.Array, rows: int) -> tuple[jax.Array, Arrays]:
        loss_sum, reported = apply(weights, **batch)
        loss = loss_sum / tokens
        metrics = {"loss": loss, **router_metrics(reported, rows)}
        return loss + router_loss(experiment.model, metrics), metrics

    def one(weights, batch, tokens, rows):
        (_, metrics), gradients = jax.value_and_grad(share, has_aux=True)(weights, batch, tokens, rows)
        return metrics, {name: on.constrain_weight(g.astype(dtype), name, "gradients") for name, g in gradients.items()}

    def compute(weights: Arrays, batch: Arrays) -> tuple[Arrays, Arrays]:
        valid, (accumulation, rows, _) = (batch["labels"] >= 0).sum(), batch["labels"].shape
        tokens, rows = jnp.maximum(valid, 1).astype(jnp.float32), accumulation * rows
        first = {name: x[0] for name, x in batch.items()}
        if accumulation == 1:
            metrics, gradients = one(weights, first, tokens, rows)
            return {**metrics, "valid_tokens": valid}, gradients

        def accumulate(total, microbatch):
            return jax.tree.map(jnp.add, total, one(weights, microbatch, tokens, rows)), None

        described, _ = jax.eval_shape(partial(one, rows=rows), weights, first, tokens)
        zeros = {name: jnp.zeros(metric.shape, metric.dtype) for name, metric in described.items()}
        nothing = {name: on.constrain_weight(jnp.zeros(w.shape, dtype), name, "gradients") for name, w in weights.items()}
        (metrics, gradients), _ = jax.lax.scan(accumulate, (zeros, nothing), batch)
        return {**metrics, "valid_tokens": valid}, gradients

    return compute


def train_step(
    experiment: Experiment, on: Placement, transform: Any, *, keep_gradients: bool = False
) -> Callable[..., tuple[Arrays, Any, dict[str, jax.Array], Arrays | None]]:
    """A pure function (weights, state, batch, lr) -> (weights, state, metrics, gradients before clipping if they are kept)."""
    compute = loss_and_gradients(experiment, on)
    clip = experiment.workload.optimizer.clip

    def step(weights, state, batch, lr):
        metrics, gradients = compute(weights, batch)
        norm = optimizer.global_norm(gradients)
        factor = optimizer.clip_factor(norm, clip)
        clipped = {name: gradient * factor for name, gradient in gradients.items()}
        weights, state = optimizer.apply(transform, on, weights, state, clipped, lr)
        return weights, state, {**metrics, "grad_norm": norm, "lr": lr}, gradients if keep_gradients else None

    return step


@dataclass(frozen=True)
class Dispatched:
    """A step on its way. `state`: what it updates, which a later step may have consumed meanwhile."""

    metrics: dict[str, jax.Array]
    state: Any

    def result(self) -> dict[str, float]:
        """Wait for the metrics and for all of the updated state, which one execution finishes together."""
        jax.block_until_ready([leaf for leaf in jax.tree.leaves(self.state) if not leaf.is_deleted()])
        return {name: float(value) for name, value in self.metrics.items()}


class JaxSession:
    """See `contract.Session`. Weights are arrays by parameter name, replaced by every step, whose buffers it reuses.

    keep_gradients: set before `prepare`, the program of the step gives its gradients too, so that `gradients` needs none of its own
    """

    keep_gradients = False

    def __init__(self, job: Job, on: Placement):
        self._job, self._on = job, on
        workload = job.experiment.workload
        self._transform = optimizer.transformation(workload.optimizer, on)
        self._described_state, self._state_shardings = optimizer.state_shardings(self._transform, on)
        self._weight_shardings = on.shardings("weights")
        self._weights: Arrays | None = None
        self._state: Any = None
        self._compiled: Any = None
        self._compilations = 0
        self._steps_done = 0
        self._evaluate: Any = None
        self._gradients = jax.jit(self._measured_gradients(), out_shardings=(on.replicated, on.shardings("gradients")))

    def prepare(self, batch: Batch) -> float:
        """Make the weights and the optimizer's state and compile the step, once."""
        if self._compiled is not None:
            return 0.0
        self._weights = sharding.place_initial(self._on, self._job.experiment.workload.seed)
        self._state = optimizer.initial_state(self._described_state, self._state_shardings)
        placed = self._placed(batch)
        started = time.perf_counter()
        self._compiled = self._jitted().lower(self._weights, self._state, placed, np.float32(0)).compile()
        self._compilations += 1
        return time.perf_counter() - started

    def _jitted(self) -> Any:
        """The step with the same shardings coming in and going out, so that its result fits the one program compiled."""
        keep = self.keep_gradients
        step = train_step(self._job.experiment, self._on, self._transform, keep_gradients=keep)
        state, batch, scalar = (self._weight_shardings, self._state_shardings), self._on.batch, self._on.replicated
        results = (*state, scalar, self._on.shardings("gradients") if keep else None)
        return jax.jit(step, donate_argnums=(0, 1), in_shardings=(*state, batch, scalar), out_shardings=results)

    def step(self, batch: Batch) -> Pending:
        """Dispatch one optimizer step."""
        self.prepare(batch)
        self._check_placed()
        workload = self._job.experiment.workload
        lr = np.float32(learning_rate(workload.optimizer, workload.steps, self._steps_done))
        self._weights, self._state, metrics, _ = self._compiled(self._weights, self._state, self._placed(batch), lr)
        self._steps_done += 1
        return Dispatched(metrics, (self._weights, self._state))

    def _check_placed(self) -> None:
        sharding.check_placed(self._made(), self._weight_shardings)
        sharding.check_placed(self._state, self._state_shardings)

    def _placed(self, batch: Batch) -> Arrays:
        """The arrays of a batch by their names; documents and positions only where rows are packed."""
        place = partial(sharding.place_batch, self._on, self._job.rows)
        return {field.name: place(x) for field in fields(batch) if (x := getattr(batch, field.name)) is not None}

    def _one(self, batch: Batch) -> Arrays:
        return {name: x[0] for name, x in self._placed(batch).items()}

    def _made(self) -> Arrays:
        if self._weights is None:
            raise WorkerError("the session was asked for its weights before `prepare`")
        return self._weights

    def prepare_evaluation(self, batch: Batch) -> float:
        """Compile the evaluation, once."""
        if self._evaluate is not None:
            return 0.0
        one = self._one(batch)
        started = time.perf_counter()
        program = jax.jit(self._evaluation(), out_shardings=self._on.replicated)
        self._evaluate = program.lower(self._made(), one).compile()
        return time.perf_counter() - started

    def evaluate(self, batch: Batch) -> Pending:
        """Dispatch the loss of one batch."""
        self.prepare_evaluation(batch)
        return Dispatched(self._evaluate(self._made(), self._one(batch)), ())

    def _evaluation(self) -> Callable[..., dict[str, jax.Array]]:
        apply = forward(self._job.experiment, self._on)

        def evaluate(weights, batch):
            return {"loss_sum": apply(weights, **batch)[0], "valid_tokens": (batch["labels"] >= 0).sum()}

        return evaluate

    def compilations(self) -> int:
        """Programs compiled for the train step."""
        return self._compilations

    def layouts(self) -> dict[str, Layout]:
        """As read off the weights themselves."""
        return {name: sharding.layout_of(array) for name, array in self._made().items()}

    def bytes_per_device(self) -> dict[str, int | None]:
        """From live arrays and, for what only exists during a step, from the compiler; the peak where the device counts it."""
        parameters = sharding.local_bytes(self._made().values())
        state = sharding.local_bytes(jax.tree.leaves(self._state))
        parts: dict[str, int | None] = {"parameters": parameters, "optimizer": state}
        analysis = self._compiled.memory_analysis() if self._compiled is not None else None
        if analysis is None:
            return {"total": None, **parts, "batch": None, "temporaries": None}
        parts["batch"] = analysis.argument_size_in_bytes - parameters - state
        parts["temporaries"] = analysis.temp_size_in_bytes
        parts["outputs"] = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        counted = sum(part for part in parts.values() if part is not None)
        return {"total": runtime.peak_bytes(self._on.mesh) or counted, **parts}

    def device_facts(self) -> dict[str, Any]:
        """What this process runs on."""
        return runtime.device_facts(self._on.mesh)

    def gradients(self, batch: Batch) -> tuple[dict[str, float], Mapping[str, np.ndarray]]:
        """Loss, norm and the whole gradient by parameter, without a step."""
        self.prepare(batch)
        if self.keep_gradients:
            consumed = jax.tree.map(jnp.copy, (self._made(), self._state))
            *_, metrics, gradients = self._compiled(*consumed, self._placed(batch), np.float32(0))
            metrics.pop("lr")
        else:
            metrics, gradients = self._gradients(self._made(), self._placed(batch))
        return Dispatched(metrics, gradients).result(), self._whole(gradients)

    def _measured_gradients(self) -> Callable[..., tuple[dict[str, jax.Array], Arrays]]:
        """One program, norm included: simulated devices share a few threads, and two programs that wait for each other's
        collectives at once can take them all and never end."""
        compute = loss_and_gradients(self._job.experiment, self._on)

        def measure(weights, batch):
            metrics, gradients = compute(weights, batch)
            return {**metrics, "grad_norm": optimizer.global_norm(gradients)}, gradients

        return measure

    def weights(self) -> Mapping[str, np.ndarray]:
        """Every parameter, whole."""
        return self._whole(self._made())

    def _whole(self, arrays: Arrays) -> dict[str, np.ndarray]:
        plan, described = self._job.plan, self._on.described
        return {name: in_order(plan, described[name], sharding.gather(array)) for name, array in arrays.items()}

    def replica_digests(self) -> dict[str, str]:
        """Of every local part of every parameter."""
        return sharding.digests(self._made())

    def close(self) -> None:
        """Leave the other processes."""
        runtime.leave(self._job)
