"""Arrays of token ids: raw as nanoGPT writes them, .npy, and the synthetic ones that exist only when asked for."""

import hashlib
import math
import os
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from experiments import experiment

from scaling_lab.data import Source, open_source
from scaling_lab.data.synthetic import SYNTHETIC_TOKENS

#: Real text as ids above a byte's: its words, numbered by first appearance.
WORDS = topics["assignment"].split()
VOCABULARY = list(dict.fromkeys(WORDS))
VOCAB = len(VOCABULARY)
IDS = [VOCABULARY.index(word) for word in WORDS]


def opened(source: str, cache: Path | None = None, vocab=VOCAB, sequence=16, **keys) -> Source:
    keys = {f"data.{key}": str(value) if isinstance(value, Path) else value for key, value in keys.items()}
    return open_source(experiment(data=source, **keys).data, vocab, sequence, cache)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_raw_ids_are_mapped_as_nanogpt_writes_them(tmp_path, dtype):
    np.array(IDS, dtype).tofile(tmp_path / "train.bin")
    source = opened("tokens", path=tmp_path / "train.bin", dtype=dtype, shuffle=False)
    assert isinstance(source.train.tokens.base, np.memmap)
    rows = source.train_rows(0, range(3), 3)
    assert rows.tokens.ravel().tolist() == IDS[:48]
    assert rows.labels.ravel().tolist() == IDS[1:49]
    assert source.corpus == {
        "source": "tokens",
        "sha256": hashlib.sha256(np.array(IDS, dtype).tobytes()).hexdigest(),
        "bytes": len(IDS) * np.dtype(dtype).itemsize,
        "tokens": len(IDS),
        "files": 1,
        "documents": None,
        "train_tokens": int(len(IDS) * 0.95),
        "validation_tokens": len(IDS) - int(len(IDS) * 0.95),
        "validation": None,
    }


def test_nanogpts_two_files_are_the_two_splits(tmp_path):
    np.array(IDS[:500], np.uint16).tofile(tmp_path / "train.bin")
    np.array(IDS[500:], np.uint16).tofile(tmp_path / "val.bin")
    source = opened("tokens", path=tmp_path / "train.bin", validation_path=tmp_path / "val.bin")
    assert source.train.tokens.tolist() == IDS[:500]
    assert source.num_train_samples == (500 - 1) // 16
    assert source.num_validation_samples == math.ceil((len(IDS) - 500 - 1) / 16)
    rows = source.validation_rows(0, range(source.num_validation_samples), source.num_validation_samples)
    assert rows.labels[rows.labels >= 0].tolist() == IDS[501:]


@pytest.mark.parametrize("dtype", ["uint16", "int64", ">u4"])
def test_npy_says_its_own_dtype(tmp_path, dtype):
    np.save(tmp_path / "ids.npy", np.array(IDS, dtype))
    rows = opened("tokens", path=tmp_path / "ids.npy", dtype=None, shuffle=False).train_rows(0, [1], 3)
    assert rows.tokens.tolist() == [IDS[16:32]]


def test_facts_of_a_file_are_kept_until_it_changes(tmp_path):
    path, cache = tmp_path / "train.bin", tmp_path / "cache"
    np.array(IDS, np.uint16).tofile(path)
    first = opened("tokens", cache, path=path).corpus
    assert opened("tokens", cache, path=path).corpus == first
    np.array(IDS[:-1], np.uint16).tofile(path)
    changed = opened("tokens", cache, path=path).corpus
    assert changed["tokens"] == first["tokens"] - 1
    assert changed["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest() != first["sha256"]
    assert len(os.listdir(cache)) == 1


def test_synthetic_tokens_are_uniform_and_depend_on_seed_and_place_alone():
    source = opened("synthetic", vocab=50257, sequence=128)
    rows = source.train_rows(3, range(512), 512)
    # 65,536 draws, uniform over 50,257: mean 25,128, standard deviation 50257 / sqrt(12) / 256 = 56.7; five of them.
    assert abs(rows.tokens.mean() - 25128) < 284
    assert rows.tokens.min() >= 0
    assert rows.tokens.max() < 50257
    assert (rows.tokens[:, 1:] == rows.labels[:, :-1]).all()
    again = opened("synthetic", vocab=50257, sequence=128).train_rows(3, [100], 512)
    assert (again.tokens == rows.tokens[100]).all()
    other = opened("synthetic", vocab=50257, sequence=128, seed=1).train_rows(3, range(512), 512)
    assert (other.tokens == rows.tokens).mean() < 0.001


def test_synthetic_tokens_never_change():
    rows = opened("synthetic", vocab=257, sequence=8).train_rows(0, [0, 1], 2)
    assert rows.tokens.tolist() == [[68, 246, 192, 151, 255, 147, 137, 25], [151, 128, 143, 126, 18, 149, 167, 15]]


def test_synthetic_data_has_splits_like_any_other():
    source = opened("synthetic", sequence=256)
    # 2**30 tokens, of which one in 10,000 is held out.
    assert source.corpus["tokens"] == SYNTHETIC_TOKENS == 1073741824
    assert source.corpus["validation_tokens"] == 107375
    assert source.num_validation_samples == 420
    assert (source.corpus["sha256"], source.corpus["bytes"], source.corpus["files"]) == (None, None, 0)
