"""The session: one compilation, shares of a batch, ignored rows, where things lie, and what it refuses."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from cases import ROWS, choices, ragged_batches
from experiments import FOUND, experiment
from jax.sharding import NamedSharding, PartitionSpec

from scaling_lab.backends.contract import Batch, Job
from scaling_lab.backends.jax import train
from scaling_lab.backends.jax.sharding import Placement
from scaling_lab.backends.jax.train import open_session
from scaling_lab.backends.rows import local_batch
from scaling_lab.errors import WorkerError
from scaling_lab.plan.plan import make_plan

FSDP = {"mesh.fsdp": 4, "mesh.tensor": 2}
ADAMW = {"workload.optimizer.name": "adamw", "workload.optimizer.lr": 0.01, "workload.steps": 4}


def job_of(table="single", accumulation=1, model="llama", **more):
    mesh = "one" if table == "single" else "auto"
    asked = experiment(**choices(model, table, "jax", accumulation, mesh=mesh, **ADAMW, **more))
    return Job(asked, make_plan(asked, FOUND), 0, "")


def batches(job):
    return [local_batch(job, tokens, labels) for tokens, labels in ragged_batches()]


def metrics_of(job):
    session = open_session(job)
    return [session.step(batch).result() for batch in batches(job)]


def assert_equal_metrics(got, wanted, rel=1e-5):
    for a, b in zip(got, wanted, strict=True):
        assert a == pytest.approx(b, rel=rel)


@pytest.fixture(scope="module")
def alone():
    """One device, everything at its default."""
    return metrics_of(job_of())


def test_fsdp_and_tensor_parallel_on_ragged_rows_equal_one_device_and_compile_once(alone):
    job = job_of("fsdp_tensor", accumulation=2)
    session, (first, second, third) = open_session(job), batches(job)
    assert session.prepare(first) > 0
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, _, **__: compiled.append(name))
    try:
        ahead = [session.step(batch) for batch in (first, second, third)]  # all dispatched before any is awaited
        assert_equal_metrics([step.result() for step in ahead], alone)
    finally:
        jax.monitoring.clear_event_listeners()
    assert not [name for name in compiled if "backend_compile" in name], "a step compiled something"
    assert session.compilations() == 1
    assert session.prepare(first) == 0.0
    assert session.layouts() == {p.parameter.name: p.weights for p in job.plan.parameters}


@pytest.mark.parametrize("accumulation", [2, 4, 16])
def test_no_factor_of_accumulation_changes_a_step(accumulation, alone):
    assert_equal_metrics(metrics_of(job_of(accumulation=accumulation)), alone)


@pytest.mark.parametrize("change", ["unrolled", "plain attention", "dots", "full"])
def test_another_form_of_the_same_equations_gives_the_same_steps(change, alone):
    key, value = {
        "unrolled": ("backend.scan_layers", False),
        "plain attention": ("backend.attention", "plain"),
        "dots": ("workload.remat", "dots"),
        "full": ("workload.remat", "full"),
    }[change]
    assert_equal_metrics(metrics_of(job_of(**{key: value})), alone)


def test_the_learning_rate_counts_optimizer_steps(alone):
    # lr 0.01, 2 steps of warm-up: half, all, then constant
    assert [m["lr"] for m in alone] == pytest.approx([0.005, 0.01, 0.01])
    assert [m["lr"] for m in metrics_of(job_of(accumulation=2))] == pytest.approx([0.005, 0.01, 0.01])


def test_a_batch_without_a_valid_label_has_loss_zero_and_moves_nothing():
    job = job_of(**{"workload.optimizer.weight_decay": 0.0})
    session, (batch, *_) = open_session(job), batches(job)
    session.prepare(batch)
    before = session.weights()
    metrics = session.step(Batch(batch.tokens, np.full_like(batch.labels, -1))).result()
    assert (metrics["loss"], metrics["grad_norm"], metrics["valid_tokens"]) == (0.0, 0.0, 0.0)
    for name, value in session.weights().items():
        np.testing.assert_array_equal(value, before[name])


def test_the_loss_is_the_quotient_of_two_global_sums():
    job = job_of("data")
    session, (batch, *_) = open_session(job), batches(job)
    session.prepare(batch)
    sums = session.evaluate(batch).result()
    valid = int((batch.labels >= 0).sum())
    assert sums["valid_tokens"] == valid
    assert session.step(batch).result()["loss"] == pytest.approx(sums["loss_sum"] / valid, rel=1e-6)


def test_gradients_leave_the_weights_alone_and_have_the_reported_norm(alone):
    job = job_of("zero2")
    session, (batch, *_) = open_session(job), batches(job)
    metrics, gradients = session.gradients(batch)
    total = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in gradients.values()))
    assert metrics["grad_norm"] == pytest.approx(total, rel=1e-5)
    assert session.step(batch).result()["loss"] == pytest.approx(alone[0]["loss"], rel=1e-5)


def test_bfloat16_products_come_near_float32_and_keep_weights_in_float32(alone):
    job = job_of("fsdp_tensor", accumulation=2, **{"workload.precision.compute": "bfloat16"})
    session = open_session(job)
    got = [session.step(batch).result() for batch in batches(job)]
    assert_equal_metrics(got, alone, rel=0.03)
    assert got != alone
    assert {value.dtype for value in session.weights().values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_a_gradient_is_summed_over_devices_in_the_reduce_dtype(reduce):
    """Read off the lowered program, before XLA for CPU widens what it cannot add."""
    precision = {"workload.precision.compute": "bfloat16", "workload.precision.reduce": reduce}
    job = job_of("data", **precision)
    session = open_session(job)
    on = Placement(session._on.mesh, job.plan, job.experiment.workload.precision)
    compute = train.loss_and_gradients(job.experiment, on)
    described = {n: jax.ShapeDtypeStruct(p.shape, np.float32) for n, p in on.described.items()}
    rows = jax.ShapeDtypeStruct((1, ROWS, 16), np.int32)
    text = jax.jit(compute).lower(described, {"tokens": rows, "labels": rows}).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line and "-> tensor<32x64x" in line]
    wanted, other = ("xf32>", "xbf16>") if reduce == "float32" else ("xbf16>", "xf32>")
    assert any(line.endswith(wanted) or f"{wanted} loc" in line for line in products), products
    assert not any(f"-> tensor<32x64{other}" in line for line in products), products


def test_a_weight_that_does_not_lie_as_planned_is_refused_by_name():
    job = job_of("fsdp_tensor")
    session, (batch, *_) = open_session(job), batches(job)
    session.prepare(batch)
    whole = NamedSharding(session._on.mesh, PartitionSpec())
    session._weights["layers.mlp.up"] = jax.device_put(session._weights["layers.mlp.up"], whole)
    with pytest.raises(WorkerError, match=r"layers\.mlp\.up lies as .* but the plan says"):
        session.step(batch)


def test_a_moment_that_does_not_lie_as_planned_is_refused_by_name():
    job = job_of("fsdp_tensor")
    session, (batch, *_) = open_session(job), batches(job)
    session.prepare(batch)
    moments = session._state[0].mu
    moments["head.weight"] = jax.device_put(np.asarray(moments["head.weight"]), jax.devices()[0])
    with pytest.raises(WorkerError, match=r"mu\.head\.weight lies as"):
        session.step(batch)


def test_a_batch_of_another_shape_is_refused():
    job = job_of("data")
    session, (batch, *_) = open_session(job), batches(job)
    with pytest.raises(WorkerError, match=r"\[accumulation, 16 rows, sequence\], not \[1, 15, 16\]"):
        session.prepare(Batch(batch.tokens[:, 1:], batch.labels[:, 1:]))


def test_replicas_have_equal_digests_and_parts_have_keys():
    job = job_of("fsdp_tensor")
    session, (batch, *_) = open_session(job), batches(job)
    session.prepare(batch)
    digests = session.replica_digests()
    # embed 32 over fsdp 4, mlp 64 over tensor 2: 8 parts; the final norm, embed over fsdp: 4 parts on 8 devices
    assert len([key for key in digests if key.startswith("layers.mlp.up|")]) == 8
    assert {key for key in digests if key.startswith("final_norm.scale|")} == {
        f"final_norm.scale|{start}:{start + 8}" for start in (0, 8, 16, 24)
    }


def test_bytes_per_device_are_those_of_the_local_parts():
    job = job_of("fsdp_tensor")
    session, (batch, *_) = open_session(job), batches(job)
    session.prepare(batch)
    found = session.bytes_per_device()
    assert found["parameters"] == job.plan.bytes_per_device["parameters"]
    assert found["optimizer"] == job.plan.bytes_per_device["optimizer"] + 4  # Adam's count, an int32
    assert found["batch"] == 2 * 4 * 4 * 16 + 4  # tokens and labels, 16 rows over fsdp 4, 16 long, int32; the learning rate
    assert found["temporaries"] > 0
    assert found["total"] == sum(part for name, part in found.items() if name != "total")


def test_weights_are_asked_for_too_early():
    with pytest.raises(WorkerError, match="before `prepare`"):
        open_session(job_of()).weights()


def test_a_plan_for_another_platform_is_refused():
    job = job_of()
    with pytest.raises(WorkerError, match=r"for platform gpu, but JAX found cpu.*hardware\.platform=cpu"):
        open_session(replace(job, plan=replace(job.plan, platform="gpu")))


def test_a_mesh_of_more_devices_than_found_is_refused():
    asked = experiment(**choices("llama", "data", "jax", mesh="auto", **{"mesh.devices": 16}))
    job = Job(asked, make_plan(asked, FOUND), 0, "")
    with pytest.raises(WorkerError, match=r"needs 16 devices, but JAX found 8.*mesh\.devices=8"):
        open_session(job)


def test_device_facts_name_the_versions():
    facts = open_session(job_of("data")).device_facts()
    assert (facts["platform"], facts["count"]) == ("cpu", 8)
    assert facts["versions"]["jax"] == jax.__version__


def test_the_program_does_not_grow_with_the_layers():
    """Compile time is flat in depth because the program is: one body, whatever the number of layers."""

    def size(layers):
        job = job_of("fsdp_tensor", **{"model.layers": layers})
        session = open_session(job)
        step = train.train_step(job.experiment, session._on, session._transform)
        shardings = session._weight_shardings, session._state_shardings
        weights = {n: jax.ShapeDtypeStruct(p.shape, np.float32) for n, p in session._on.described.items()}
        rows = jax.ShapeDtypeStruct((1, ROWS, 16), np.int32)
        batch = {"tokens": rows, "labels": rows}
        lowered = jax.jit(step, in_shardings=(*shardings, None, None)).lower(
            weights, session._described_state, batch, np.float32(0)
        )
        return len(lowered.as_text().splitlines())

    assert size(32) == size(4)
