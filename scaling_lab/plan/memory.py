"""Bytes per device, by arithmetic: parameters, gradients, optimizer state and activations. Owns formulas, no limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Protocol

from scaling_lab.models import decoder
from scaling_lab.models.model import Model
from scaling_lab.models.parameters import Parameter
from scaling_lab.plan.experiment import Experiment
from scaling_lab.plan.layout import Layout
from scaling_lab.plan.mesh import Mesh
from scaling_lab.plan.pipeline import PipelineSplit
from scaling_lab.plan.rules import Rules

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

#: Copies of a parameter's size that the optimizer keeps, in the parameters' dtype.
OPTIMIZER_COPIES = {"adamw": 2, "sgd": 0}


class Placed(Protocol):
    """A parameter with its layouts (`plan.ParameterPlan`)."""

    @property
    def parameter(self) -> Parameter:
        """What it is."""
        ...

    @property
    def weights(self) -> Layout:
        """As stored."""
        ...

    @property
    def compute(self) -> Layout:
        """As used: gathered over its fsdp axes."""
        ...

    @property
    def gradients(self) -> Layout:
        """Of its reduced gradient."""
        ...

    @property
    def optimizer(self) -> Layout:
        """Of its optimizer state."""
        ...

    @property
    def stages(self) -> tuple[int, ...]:
        """The pipeline stages that hold any of it."""
        ...


def bytes_per_device(
    experiment: Experiment, plans: Iterable[Placed], rules: Rules, mesh: Mesh, split: PipelineSplit
) -> dict[str, int]:
    """Bytes that one device holds at the peak of a step, by part, with `total`: of the pipeline stage that holds most.

    parameters: as stored; gradients: one copy as reduced; optimizer: its state; gathered: the compute copies of the largest
    layer and of what lies outside the layers, where these differ from the stored ones or torch's FSDP makes some anyway;
    activations: see `activation_bytes`.
    Stages with a program each (torch) gather all of their layers and add up whole gradients until the last microbatch is done,
    and then reduce these once.
    """
    plans = tuple(plans)
    stages = (
        _bytes_of_stage(experiment, tuple(p for p in plans if stage in p.stages), rules, mesh, split, stage)
        for stage in range(split.stages)
    )
    return max(stages, key=lambda parts: parts["total"])


def _bytes_of_stage(
    experiment: Experiment, plans: tuple[Placed, ...], rules: Rules, mesh: Mesh, split: PipelineSplit, stage: int
) -> dict[str, int]:
    stored = DTYPE_BYTES[experiment.workload.precision.params]
    copies = OPTIMIZER_COPIES[experiment.workload.optimizer.name]
    if experiment.workload.optimizer.name == "sgd" and experiment.workload.optimizer.momentum:
        copies = 1
    kept = split.stages > 1 and not split.one_program
    whole = sum(_local(p, p.compute, mesh) for p in plans if p.compute != p.weights) if kept else 0
    parts = {
        "parameters": stored * sum(_local(p, p.weights, mesh) for p in plans),
        "gradients": stored * sum(_local(p, p.gradients, mesh) for p in plans)
        + DTYPE_BYTES[experiment.workload.precision.reduce] * whole,
        "optimizer": stored * copies * sum(_local(p, p.optimizer, mesh) for p in plans),
        "gathered": DTYPE_BYTES[experiment.workload.precision.compute] * whole if kept else _gathered(experiment, plans, mesh),
        "activations": activation_bytes(experiment, rules, mesh, split, stage),
    }
    return {"total": sum(parts.values()), **parts}


def _local(plan: Placed, layout: Layout, mesh: Mesh) -> int:
    return math.prod(layout.local_shape(plan.parameter.shape, mesh))


def _gathered(experiment: Experiment, plans: tuple[Placed, ...], mesh: Mesh) -> int:
    """One layer at a time, the larger of the stacks' layers, and what lies outside them."""
    sizes: dict[str, int] = {}
    copied = experiment.backend.data_parallel == "fully_shard" and mesh.devices > 1
    for plan in plans:
        if copied or plan.compute != plan.weights:
            where = plan.parameter.name.split(".")[0] if plan.parameter.stacked else ""
            local = plan.compute.local_shape(plan.parameter.shape, mesh)
            sizes[where] = sizes.get(where, 0) + math.prod(local[1:] if plan.parameter.stacked else local)
    outside = sizes.pop("", 0)
    return DTYPE_BYTES[experiment.workload.precision.compute] * (outside + max(sizes.values(), default=0))


def activation_bytes(experiment: Experiment, rules: Rules, mesh: Mesh, split: PipelineSplit, stage: int = 0) -> int:
    """Bytes of activations that the backward pass needs at its start, for one microbatch.

    Per layer: the residual stream twice and, by `workload.remat`, `none`: both norms' outputs, queries, keys, values, attention
    output, and the mlp's hidden values (three for a gated one, two else), fused attention keeping no scores; `dots`: outputs of
    products only; `full`: nothing more. Outside: logits and their gradient in float32, of one loss chunk. After Korthikanti et al. 2022
    (arXiv 2205.05198), section 4, without dropout and with fused attention. Experts: as if their tokens were spread evenly over
    the devices, each token's input and output once for each of its experts. A pipeline's stage: its layers for as many of the
    pipeline's microbatches as `in_flight` says, and all rows between the stages: in one program twice, else (torch) what comes to
    each chunk from the one before and from the one after.
    """
    model, workload = experiment.model, experiment.workload
    rows, sequence = workload.global_batch // workload.accumulation // split.microbatches, workload.sequence

    def local(**axes: int) -> int:
        shape = (rows, sequence, *(size for name, size in axes.items() if not name.endswith("sequence")))
        names = ("batch", "residual_sequence" if "residual_sequence" in axes else "sequence")
        layout = rules.activation_layout((*names, *(name for name in axes if not name.endswith("sequence"))))
        return math.prod(layout.local_shape(shape, mesh))

    residual = local(residual_sequence=0, embed=model.embed)
    inside = local(embed=model.embed)
    attention = _attention_size(model, local)
    size = 0
    for stack, layers in decoder.stacks(model).items():
        mixture = model.moe if stack == "layers" else None
        width = mixture.expert_mlp * (mixture.experts_per_token + mixture.shared_experts) if mixture else model.mlp
        hidden = local(mlp=width)
        sent = 2 * mixture.experts_per_token * inside if mixture else 0
        products = attention + (2 if model.activation == "swiglu" else 1) * hidden + sent
        per_layer = {"full": residual, "dots": 2 * residual + products, "none": 2 * residual + 2 * inside + products + hidden}
        held = split.room * split.in_flight[stage] if split.stages > 1 else len(layers)
        size += held * per_layer[workload.remat]
    logits = 2 * 4 * local(vocab=model.padded_vocab) // workload.loss_chunks
    if split.one_program:
        size += 2 * split.microbatches * residual + (2 * split.stages - 1) * residual * split.by_turns
        ending = split.vocab_spread if split.by_turns else split.spread
        logits = logits * (1 if split.by_turns else split.microbatches) // (split.stages if ending else 1)
    elif split.stages > 1:
        comes = 2 * split.virtual_stages - (stage == 0) - (stage == split.stages - 1)
        size += comes * split.microbatches * residual
        logits *= split.logits_in_flight if stage == split.stages - 1 else 0
    return DTYPE_BYTES[workload.precision.compute] * size + logits


def _attention_size(model: Model, local: Callable[..., int]) -> int:
    """Elements of queries, keys, values and attention output of one layer."""
    if model.latent:
        query, value = model.latent.nope_dim + model.latent.rope_dim, model.latent.value_dim
        return 2 * local(heads=model.heads, head_dim=query) + 2 * local(heads=model.heads, head_dim=value)
    keys_values = 2 * local(kv_heads=model.kv_heads, head_dim=model.head_dim)
    return 2 * local(heads=model.heads, head_dim=model.head_dim) + keys_values
