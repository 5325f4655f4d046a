"""The two small models of the parity matrix, ragged batches for them, and what a session computes on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from experiments import FOUND

from scaling_lab.backends.contract import Job
from scaling_lab.backends.rows import local_batch
from scaling_lab.config import experiment_from
from scaling_lab.plan.plan import make_plan

#: 2 KV heads, RMSNorm, RoPE, SwiGLU, untied; and LayerNorm, learned positions, GELU, biases, a tied head.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model": "tiny"},
    "gpt2": {"model": "tiny_gpt2"},
}
SMALL = {"layers": 2, "embed": 32, "heads": 4, "head_dim": 8, "mlp": 64, "vocab": 64}
KV_HEADS = {"llama": 2, "gpt2": 4}
SEQUENCE, ROWS, STEPS = 16, 16, 3


def choices(model: str, table: str, backend: str, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    """Arguments of `experiments.plain` for a case: SGD, so that updated weights show gradients unscaled."""
    sizes = {f"model.{name}": size for name, size in {**SMALL, "kv_heads": KV_HEADS[model]}.items()}
    workload = {"global_batch": ROWS, "sequence": SEQUENCE, "steps": STEPS, "untimed_steps": 1, "accumulation": accumulation}
    optimizer = {"name": "sgd", "lr": 0.3, "schedule": "constant", "warmup_steps": 2, "clip": 0.5, "weight_decay": 0.01}
    return {
        **MODELS[model],
        "sharding": table,
        "backend": backend,
        "tracking": "disabled",
        **sizes,
        **{f"workload.{key}": value for key, value in workload.items()},
        **{f"workload.optimizer.{key}": value for key, value in optimizer.items()},
        **more,
    }


#: (tokens, labels) of each step, and the documents of packed rows.
Batches = list[tuple[np.ndarray, ...]]


def ragged_batches(
    vocab: int = SMALL["vocab"], sequence: int = SEQUENCE, rows: int = ROWS
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens, labels) for each step. Rows keep 0 to all of their tokens; rows 2 and 3 of every batch, all of one device's, none."""
    random = np.random.default_rng(7)
    batches = []
    for _ in range(STEPS):
        window = random.integers(0, vocab, (rows, sequence + 1), dtype=np.int32)
        lengths = random.integers(0, sequence + 1, rows)
        lengths[2:4] = 0
        labels = np.where(np.arange(sequence) < lengths[:, None], window[:, 1:], -1).astype(np.int32)
        batches.append((np.ascontiguousarray(window[:, :-1]), labels))
    return batches


@dataclass(frozen=True)
class Outcome:
    """What a case computed: gradients of the first batch before any step, metrics of each step, weights after the last."""

    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]


def run_session(session: Any, job: Job, batches: Batches) -> Outcome:
    """Gradients of the first batch, then one step a batch, all by one program: most of a test's time is compiling."""
    session.keep_gradients = True
    local = [local_batch(job, *batch) for batch in batches]
    session.prepare(local[0])
    _, gradients = session.gradients(local[0])
    metrics = [session.step(batch).result() for batch in local]
    return Outcome(
        losses=[m["loss"] for m in metrics],
        grad_norms=[m["grad_norm"] for m in metrics],
        gradients=dict(gradients),
        weights=dict(session.weights()),
    )


def outcome_over(pool: Any, config: dict[str, Any], batches: Batches) -> Outcome:
    """What an experiment computes over the ranks of a pool; its layouts are the planned ones, and replicas have the same bits."""
    found = pool.run(config, batches, want=("weights", "gradients"))
    replicas: dict[str, str] = {}
    for digests in found["digests"]:
        for part, digest in digests.items():
            assert replicas.setdefault(part, digest) == digest, f"replicas of {part} drifted apart"
    planned = make_plan(experiment_from(config), FOUND).parameters
    assert found["layouts"] == {p.parameter.name: p.weights for p in planned}
    return Outcome(found["losses"], found["grad_norms"], found["gradients"], found["weights"])


def differences(found: Outcome, wanted: Outcome) -> list[str]:
    """Where two outcomes differ by more than the design's tolerances, in words; empty where they are equal."""
    faults = []
    for name in ("losses", "grad_norms"):
        a, b = np.array(getattr(found, name)), np.array(getattr(wanted, name))
        if not np.allclose(a, b, rtol=1e-5, atol=0):
            faults.append(f"{name}: {a} against {b}")
    for name in ("gradients", "weights"):
        faults += _tensor_differences(name, getattr(found, name), getattr(wanted, name))
    return faults


def _tensor_differences(what: str, found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> list[str]:
    if found.keys() != wanted.keys():
        return [f"{what}: other names, {sorted(found.keys() ^ wanted.keys())}"]
    total = float(np.sqrt(sum(np.square(value, dtype=np.float64).sum() for value in wanted.values())))
    faults = []
    for name, value in wanted.items():
        apart = float(np.linalg.norm(np.asarray(found[name], np.float64) - value))
        allowed = 1e-4 * max(float(np.linalg.norm(value)), 1e-3 * total)
        if not apart <= allowed:
            faults.append(f"{what} of {name}: {apart:.3e} apart, {allowed:.3e} allowed")
    return faults
