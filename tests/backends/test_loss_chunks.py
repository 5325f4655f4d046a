"""A loss in chunks keeps no logits of all tokens, in either backend, whole or split over the vocabulary, and sums its gradient once."""

import math
import re

import jax
import pytest
import torch
from cases import ragged_batches
from experiments import FOUND
from test_parity import config
from torch.utils._python_dispatch import TorchDispatchMode

from scaling_lab.backends.jax.runtime import mesh_of
from scaling_lab.backends.jax.sharding import Placement
from scaling_lab.backends.jax.train import loss_and_gradients
from scaling_lab.config import experiment_from
from scaling_lab.plan.plan import make_plan

#: Logits that are larger than everything else: of 16 rows of 64 tokens, on 4 x 2 devices twice all weights and gradients.
VOCAB, SEQUENCE, TOKENS = 4096, 64, 16 * 64
CHUNKS = 4
#: Tables, and how many parts have the tokens, and the vocabulary.
SPLITS = {"single": (1, 1), "tensor": (4, 2), "fsdp_tensor": (4, 2)}


def case(table, backend, chunks):
    return config(
        "llama", table, backend, **{"model.vocab": VOCAB, "workload.sequence": SEQUENCE, "workload.loss_chunks": chunks}
    )


def compiled(plain):
    """The text of the compiled gradient."""
    experiment = experiment_from(plain)
    plan = make_plan(experiment, FOUND)
    on = Placement(mesh_of(plan, jax.devices()[: plan.mesh.devices]), plan, experiment.workload.precision)
    shardings = on.shardings("weights")
    weights = {name: jax.ShapeDtypeStruct(p.shape, "float32", sharding=shardings[name]) for name, p in on.described.items()}
    batch = {name: jax.ShapeDtypeStruct((1, 16, SEQUENCE), "int32", sharding=on.batch) for name in ("tokens", "labels")}
    compute = jax.jit(loss_and_gradients(experiment, on), out_shardings=(None, on.shardings("gradients")))
    return compute.lower(weights, batch).compile().as_text()


def sizes(text):
    return [math.prod(map(int, shape.split(","))) for shape in re.findall(r"(?:f32|s32|pred)\[([\d,]+)\]", text)]


@pytest.mark.xdist_group("jax_llama")
@pytest.mark.parametrize("table", SPLITS)
def test_a_loss_in_chunks_holds_the_logits_of_one_chunk_in_jax(table):
    tokens, vocab = SPLITS[table]
    logits = TOKENS // tokens * VOCAB // vocab
    assert max(sizes(compiled(case(table, "jax", 1)))) == logits
    assert max(sizes(compiled(case(table, "jax", CHUNKS)))) == logits // CHUNKS


@pytest.mark.xdist_group("jax_llama")
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_the_gradient_of_the_head_leaves_a_device_once_whatever_the_chunks(model):
    """No collective of a loop has the size of the head: 32 x 4,096 numbers, or a quarter where reduce-scattered."""
    keys = {"model.vocab": VOCAB, "workload.loss_chunks": CHUNKS, "model.layers": 1, "workload.sequence": SEQUENCE}
    text = compiled(config(model, "fsdp", "jax", **{**keys, "mesh.devices": 4}))
    found = {}
    for computation in re.split(r"\n(?=\S.*\{\n)", text):
        shapes = re.findall(r" = (.*) (?:all-reduce|reduce-scatter)(?:-start)?\(", computation)
        found[computation.split()[0]] = sum(max(sizes(shape), default=0) >= 32 * VOCAB // 4 for shape in shapes)
    assert found.pop("ENTRY") >= 1
    assert not any(found.values()), found


class Largest(TorchDispatchMode):
    """The most numbers in a local part of any floating tensor that an operator gives."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for x in found if isinstance(found, tuple | list) else (found,):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                self.size = max(self.size, getattr(x, "_local_tensor", x).numel())
        return found


def largest_in_torch(session, job, batches):
    from scaling_lab.backends.rows import local_batch

    batch = local_batch(job, *batches[0])
    session.prepare(batch)
    with Largest() as seen:
        session.gradients(batch)
    return seen.size


@pytest.mark.xdist_group("torch_parity")
@pytest.mark.parametrize("table", SPLITS)
def test_a_loss_in_chunks_holds_the_logits_of_one_chunk_in_torch(table, torch_ranks):
    tokens, vocab = SPLITS[table]
    logits = TOKENS // tokens * VOCAB // vocab

    def largest(chunks):
        found = torch_ranks.run(case(table, "torch", chunks), ragged_batches(VOCAB, SEQUENCE), call=largest_in_torch)
        return max(size for size in found["results"] if size is not None)

    assert largest(1) == logits
    assert largest(CHUNKS) < logits // 2
