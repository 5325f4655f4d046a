"""What no mesh can mend: sizes and switches of model, workload and backend that contradict each other. Every offender at once."""

from __future__ import annotations

from collections.abc import Iterator

from scaling_lab.errors import ConfigError
from scaling_lab.models.model import Model
from scaling_lab.plan.experiment import Experiment

#: Keys that one backend has, with their usual values; null in the other.
BACKEND_KEYS: dict[str, dict[str, bool | str]] = {
    "jax": {"module": "flax", "axis_types": "auto", "scan_layers": True, "partitioner": "shardy"},
    "torch": {"compile": False, "reshard_after_forward": True, "data_parallel": "buckets"},
}


def check_model(experiment: Experiment) -> None:
    """What no mesh can mend: sizes of the model and the workload that contradict each other."""
    faults = list(_model_faults(experiment))
    if faults:
        raise ConfigError("\n".join(faults))


def _model_faults(experiment: Experiment) -> Iterator[str]:
    model, workload = experiment.model, experiment.workload
    yield from _unused_keys(experiment)
    yield from _mixture_faults(experiment)
    yield from _latent_faults(model)
    if model.heads % model.kv_heads:
        fitting = [n for n in range(1, model.heads + 1) if model.heads % n == 0]
        near = min(fitting, key=lambda n: abs(n - model.kv_heads))
        yield f"model.heads={model.heads} is not a multiple of model.kv_heads={model.kv_heads}. Set model.kv_heads={near}."
    if model.positions == "rope":
        yield from _rotary_faults(experiment)
    else:
        yield from _learned_faults(experiment)
    if workload.steps and workload.steps <= workload.untimed_steps:
        yield (
            f"workload.untimed_steps={workload.untimed_steps} leaves none of workload.steps={workload.steps} to time. "
            f"Set workload.untimed_steps={min(workload.steps - 1, 5)}."
        )


def _unused_keys(experiment: Experiment) -> Iterator[str]:
    """Keys that say something to whoever would not listen."""
    backend, optimizer = experiment.backend, experiment.workload.optimizer
    if backend.name == "torch" and backend.processes != "per_device":
        yield f"backend.processes={backend.processes}: a torch process drives one device. Set backend.processes=per_device."
    if backend.name == "torch" and backend.xla_flags:
        yield "backend.xla_flags is for backend=jax; torch has no XLA. Set backend.xla_flags=[]."
    for owner, keys in BACKEND_KEYS.items():
        for key, usual in keys.items():
            value = getattr(backend, key)
            if backend.name == owner and value is None:
                yield f"backend.{key} is null: {owner} needs it. Set backend.{key}={_yaml(usual)}."
            if backend.name != owner and value is not None:
                yield (
                    f"backend.{key}={_yaml(value)} is for backend={owner}; {backend.name} has no use for it. Set backend.{key}=null."
                )
    if optimizer.name == "adamw" and optimizer.momentum:
        yield (
            f"workload.optimizer.momentum={optimizer.momentum} is for workload.optimizer.name=sgd; AdamW has "
            f"workload.optimizer.b1. Set workload.optimizer.momentum=0."
        )


def _yaml(value: bool | str) -> str:
    return value if isinstance(value, str) else str(value).lower()


def _mixture_faults(experiment: Experiment) -> Iterator[str]:
    model, moe, sequence = experiment.model, experiment.model.moe, experiment.workload.sequence
    if moe is None:
        return
    if moe.experts_per_token > moe.experts:
        yield (
            f"model.moe.experts_per_token={moe.experts_per_token} is more than model.moe.experts={moe.experts}. "
            f"Set model.moe.experts_per_token={moe.experts}."
        )
    if moe.dense_layers >= model.layers:
        yield (
            f"model.moe.dense_layers={moe.dense_layers} leaves no layer of model.layers={model.layers} with experts. "
            f"Set model.moe.dense_layers={model.layers - 1}, or model.moe=null."
        )
    if model.bias:
        yield "model.bias=true: experts have no biases. Set model.bias=false."
    if moe.capacity_factor is not None and moe.capacity_factor * moe.experts_per_token >= moe.experts:
        yield (
            f"model.moe.capacity_factor={moe.capacity_factor}: an expert would have room for all {sequence} tokens of a sequence. "
            f"Set model.moe.capacity_factor=null, which drops none."
        )


def _latent_faults(model: Model) -> Iterator[str]:
    latent = model.latent
    if latent is None:
        return
    if model.positions != "rope":
        yield f"model.latent needs rotary positions, not model.positions={model.positions}. Set model.positions=rope."
    if model.bias:
        yield "model.bias=true: latent attention has no biases. Set model.bias=false."
    if model.qk_norm:
        yield "model.qk_norm=true: latent attention has norms of its own. Set model.qk_norm=false."
    if latent.rope_dim % 2:
        yield f"model.latent.rope_dim={latent.rope_dim} is odd. Set model.latent.rope_dim={latent.rope_dim + 1}."
    if model.kv_heads != model.heads:
        yield f"model.kv_heads={model.kv_heads}: latent attention has as many as heads. Set model.kv_heads={model.heads}."
    if model.head_dim != latent.nope_dim + latent.rope_dim:
        yield (
            f"model.head_dim={model.head_dim} is not nope_dim + rope_dim of model.latent. "
            f"Set model.head_dim={latent.nope_dim + latent.rope_dim}."
        )


def _rotary_faults(experiment: Experiment) -> Iterator[str]:
    model = experiment.model
    if model.head_dim % 2 and model.latent is None:
        yield f"model.head_dim={model.head_dim} is odd: rotary positions turn pairs. Set model.head_dim={model.head_dim + 1}."
    if model.max_sequence is not None:
        yield f"model.max_sequence={model.max_sequence} has no meaning with model.positions=rope. Set model.max_sequence=null."


def _learned_faults(experiment: Experiment) -> Iterator[str]:
    model, sequence = experiment.model, experiment.workload.sequence
    if model.rope_scaling is not None:
        yield "model.rope_scaling has no meaning with model.positions=learned. Set model.rope_scaling=null."
    if model.max_sequence is None:
        yield (
            "model.max_sequence is null: learned positions need the number of rows of their table. "
            f"Set model.max_sequence={sequence}."
        )
    elif sequence > model.max_sequence:
        yield (
            f"workload.sequence={sequence} is longer than model.max_sequence={model.max_sequence}. "
            f"Set workload.sequence={model.max_sequence}."
        )
