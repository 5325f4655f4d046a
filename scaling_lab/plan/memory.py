"""Bytes per device, by arithmetic: parameters, gradients, optimizer state and activations. Owns formulas, no limits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

from scaling_lab.models.parameters import Parameter
from scaling_lab.plan.experiment import Experiment
from scaling_lab.plan.layout import Layout
from scaling_lab.plan.mesh import Mesh
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


def bytes_per_device(experiment: Experiment, plans: Iterable[Placed], rules: Rules, mesh: Mesh) -> dict[str, int]:
    """Bytes that one device holds at the peak of a step, by part, with `total`.

    parameters: as stored; gradients: one copy as reduced; optimizer: its state; gathered: the compute copies of the largest
    layer and of what lies outside the layers, where these differ from the stored ones; activations: see `activation_bytes`.
    """
    plans = tuple(plans)
    stored = DTYPE_BYTES[experiment.workload.precision.params]
    copies = OPTIMIZER_COPIES[experiment.workload.optimizer.name]
    if experiment.workload.optimizer.name == "sgd" and experiment.workload.optimizer.momentum:
        copies = 1
    parts = {
        "parameters": stored * sum(_local(p, p.weights, mesh) for p in plans),
        "gradients": stored * sum(_local(p, p.gradients, mesh) for p in plans),
        "optimizer": stored * copies * sum(_local(p, p.optimizer, mesh) for p in plans),
        "gathered": _gathered(experiment, plans, mesh),
        "activations": activation_bytes(experiment, rules, mesh),
    }
    return {"total": sum(parts.values()), **parts}


def _local(plan: Placed, layout: Layout, mesh: Mesh) -> int:
    return math.prod(layout.local_shape(plan.parameter.shape, mesh))


def _gathered(experiment: Experiment, plans: tuple[Placed, ...], mesh: Mesh) -> int:
    compute = DTYPE_BYTES[experiment.workload.precision.compute]
    layers = experiment.model.layers
    size = 0
    for plan in plans:
        if plan.compute != plan.weights:
            size += _local(plan, plan.compute, mesh) // (layers if plan.parameter.stacked else 1)
    return compute * size


def activation_bytes(experiment: Experiment, rules: Rules, mesh: Mesh) -> int:
    """Bytes of activations that the backward pass needs at its start, for one microbatch.

    Per layer: the residual stream twice and, by `workload.remat`, `none`: both norms' outputs, queries, keys, values, attention
    output, and the mlp's hidden values (three for a gated one, two else), fused attention keeping no scores; `dots`: outputs of
    products only; `full`: nothing more. Outside: logits and their gradient in float32. After Korthikanti et al. 2022
    (arXiv 2205.05198), section 4, without dropout and with fused attention.
    """
    model, workload = experiment.model, experiment.workload
    rows, sequence = workload.global_batch // workload.accumulation, workload.sequence

    def local(**axes: int) -> int:
        shape = (rows, sequence, *(size for name, size in axes.items() if not name.endswith("sequence")))
        names = ("batch", "residual_sequence" if "residual_sequence" in axes else "sequence")
        layout = rules.activation_layout((*names, *(name for name in axes if not name.endswith("sequence"))))
        return math.prod(layout.local_shape(shape, mesh))

    residual = local(residual_sequence=0, embed=model.embed)
    inside = local(embed=model.embed)
    query = local(heads=model.heads, head_dim=model.head_dim)
    keys_values = 2 * local(kv_heads=model.kv_heads, head_dim=model.head_dim)
    hidden = local(mlp=model.mlp)
    gated = model.activation == "swiglu"
    products = query + keys_values + query + (2 if gated else 1) * hidden
    per_layer = {"full": residual, "dots": 2 * residual + products, "none": 2 * residual + 2 * inside + products + hidden}
    logits = 2 * 4 * local(vocab=model.vocab)
    return DTYPE_BYTES[workload.precision.compute] * model.layers * per_layer[workload.remat] + logits
