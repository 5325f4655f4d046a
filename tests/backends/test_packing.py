"""Packed rows: several documents in a row give the loss and gradients of each document in a row of its own, in every layout."""

import functools

import numpy as np
import pytest
from cases import ROWS, SEQUENCE, SMALL, Outcome, differences
from test_parity import config, run_jax

from scaling_lab.backends.rows import restarted

#: Documents of a row, by the row's number modulo 4: lengths that end inside, at and beyond the parts of a split sequence.
LENGTHS = ((16,), (3, 13), (1, 4, 4, 7), (9, 2, 5))
STEPS = 3


def documents(step):
    """The documents of each row of a batch: token ids, each with the label that the next token of the same document is."""
    random = np.random.default_rng(step)
    return [[random.integers(0, SMALL["vocab"], n, dtype=np.int32) for n in LENGTHS[row % 4]] for row in range(ROWS)]


def labels_of(document):
    """The last token of a document has none."""
    return np.append(document[1:], -1).astype(np.int32)


def packed(step):
    rows = documents(step)
    numbers = [np.repeat(np.arange(len(row), dtype=np.int32), [len(d) for d in row]) for row in rows]
    labels = [np.concatenate([labels_of(d) for d in row]) for row in rows]
    return np.stack([np.concatenate(row) for row in rows]), np.stack(labels), np.stack(numbers)


def unpacked(step):
    """Every document in a row of its own, padded, and empty rows up to 4 for each packed one."""
    tokens, labels = np.zeros((4 * ROWS, SEQUENCE), np.int32), np.full((4 * ROWS, SEQUENCE), -1, np.int32)
    for place, document in enumerate(d for row in documents(step) for d in row):
        tokens[place, : len(document)] = document
        labels[place, : len(document)] = labels_of(document)
    return tokens, labels


@functools.cache
def reference(model) -> Outcome:
    return run_jax(config(model, "single", "jax", **{"workload.global_batch": 4 * ROWS}), [unpacked(s) for s in range(STEPS)])


BATCHES = [packed(step) for step in range(STEPS)]
FOUR = {"mesh.context": 4, "mesh.fsdp": 2}
#: Layouts: table and keys.
LAYOUTS = {
    "one device": ("single", {}),
    "one device, plain": ("single", {"backend.attention": "plain"}),
    "sequence parallel": ("fsdp_tensor_sequence", {}),
    "gather": ("context", {"workload.context.strategy": "gather", **FOUR}),
    "ring": ("context", {"workload.context.strategy": "ring", **FOUR}),
    "ring in order": ("context", {"workload.context.strategy": "ring", "workload.context.zigzag": False, **FOUR}),
    "all-to-all": ("context", {"workload.context.strategy": "all_to_all"}),
    "ring and tensor": ("fsdp_tensor_context", {"workload.context.strategy": "ring"}),
}


@pytest.mark.xdist_group("jax_llama")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_rows_in_jax_equal_a_row_for_each_document(layout):
    table, keys = LAYOUTS[layout]
    assert differences(run_jax(config("llama", table, "jax", **keys), BATCHES), reference("llama")) == []


@pytest.mark.xdist_group("jax_gpt2")
def test_learned_positions_restart_with_each_document():
    assert differences(run_jax(config("gpt2", "single", "jax", accumulation=2), BATCHES), reference("gpt2")) == []


@pytest.mark.xdist_group("torch_parity")
@pytest.mark.parametrize(("model", "layout"), [*(("llama", layout) for layout in LAYOUTS), ("gpt2", "ring")])
def test_packed_rows_in_torch_equal_a_row_for_each_document_in_jax(model, layout, torch_pool):
    table, keys = LAYOUTS[layout]
    assert differences(torch_pool(config(model, table, "torch", **keys), BATCHES), reference(model)) == []


def test_positions_restart_where_the_document_changes():
    numbers = np.array([[[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]]], np.int32)
    assert restarted(numbers).tolist() == [[[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]]]
