"""A padded vocabulary and a loss in chunks change nothing: the numbers are those of the plain model on one device."""

import numpy as np
import pytest
from cases import Outcome, differences, ragged_batches
from test_parity import config, run_jax

from scaling_lab.config import experiment_from
from scaling_lab.models import decoder

ODD = {"model.vocab": 61}
PADDED = {**ODD, "model.vocab_multiple": 8}
#: Tables and keys. 61 tokens padded to 64 over 2 devices; in chunks, also of a split sequence.
CASES = {
    "padded": ("single", PADDED),
    "padded, split": ("tensor", PADDED),
    "padded so that a device has nothing else": ("tensor", {**ODD, "model.vocab_multiple": 128, "mesh.tensor": 2}),
    "padded, split, in chunks": ("fsdp_tensor", {**PADDED, "workload.loss_chunks": 4}),
    "in chunks": ("fsdp", {**ODD, "workload.loss_chunks": 2}),
    "a split sequence in chunks": ("context", {**ODD, "workload.loss_chunks": 2}),
}


def odd_batches():
    return ragged_batches(vocab=61)


def cut(outcome: Outcome, plain) -> Outcome:
    """Without padding, which must have no gradient and stay zero."""
    shapes = {p.name: p.used_shape for p in decoder.parameters(experiment_from(plain).model)}

    def without(arrays):
        kept = {name: arrays[name][tuple(slice(size) for size in shape)] for name, shape in shapes.items()}
        for name, array in arrays.items():
            assert np.abs(array).sum() == pytest.approx(np.abs(kept[name]).sum(), rel=1e-6), f"{name}: padding is not zero"
        return kept

    return Outcome(outcome.losses, outcome.grad_norms, without(outcome.gradients), without(outcome.weights))


def wanted(model):
    return run_jax(config(model, "single", "jax", **ODD), odd_batches())


@pytest.fixture(scope="module")
def plain_outcomes():
    return {model: wanted(model) for model in ("llama", "gpt2")}


@pytest.mark.xdist_group("torch_parity")
@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize("case", CASES)
def test_torch_with_a_padded_vocabulary_or_in_chunks_equals_the_plain_model(model, case, plain_outcomes, torch_pool):
    table, keys = CASES[case]
    plain = config(model, table, "torch", **keys)
    assert differences(cut(torch_pool(plain, odd_batches()), plain), plain_outcomes[model]) == []


@pytest.mark.xdist_group("jax_llama")
@pytest.mark.parametrize("case", CASES)
def test_jax_with_a_padded_vocabulary_or_in_chunks_equals_the_plain_model(case, plain_outcomes):
    table, keys = CASES[case]
    plain = config("llama", table, "jax", **keys)
    assert differences(cut(run_jax(plain, odd_batches()), plain), plain_outcomes["llama"]) == []
