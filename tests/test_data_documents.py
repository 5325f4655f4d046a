"""Packed rows: where documents begin in each source, by hand, and what a row says about them, against the whole stream."""

import hashlib
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from experiments import experiment
from tokenizers import Tokenizer, models, pre_tokenizers

from scaling_lab.data import IGNORED, Source, open_source, token_file
from scaling_lab.data.documents import Borders, ListedBorders, borders_of_lengths
from scaling_lab.data.source import Split
from scaling_lab.data.synthetic import synthetic_corpus

END = 9
STDLIB = Path(sysconfig.get_path("stdlib"))


def opened(source: str, cache: Path | None = None, vocab=256, sequence=4, **keys) -> Source:
    keys = {f"data.{key}": str(value) if isinstance(value, Path) else value for key, value in keys.items()}
    return open_source(experiment(data=source, **{"data.pack": True, **keys}).data, vocab, sequence, cache)


def starts(source: Source) -> list[int]:
    """Every place of the corpus at which a document begins."""
    assert source.train.borders is not None
    return source.train.borders.starts(0, source.corpus["tokens"]).tolist()


def packed(tokens, borders: Borders | None, sequence: int, border: int | None = None, **keys) -> Source:
    """Rows over tokens of which the first `border` are trained on, by default all."""
    border = len(tokens) if border is None else border
    train, validation = Split(tokens, 0, border, True, borders), Split(tokens, border, len(tokens), False, borders)
    return Source({}, train, validation, sequence, **{"seed": 0, "shuffle": False, "ragged": False, **keys})


@pytest.fixture
def folder(tmp_path):
    """Four files of 3, 0, 2 and 0 bytes."""
    root = tmp_path / "texts"
    root.mkdir()
    for name, text in [("a", "one"), ("b", ""), ("c", "hi"), ("d", "")]:
        (root / name).write_text(text)
    return root


def written(folder: Path, *ids: int) -> Path:
    np.array(ids, np.uint16).tofile(folder / "ids.bin")
    return folder / "ids.bin"


def test_starts_are_those_within_the_part_asked_for():
    # Lengths 3, 2, 4: they begin at 0, 3 and 5. Empty documents hold no token, so none begins there.
    borders = borders_of_lengths([3, 0, 2, 4, 0])
    assert borders.count == 3
    assert borders.starts(0, 9).tolist() == [0, 3, 5]
    assert borders.starts(3, 5).tolist() == [3]
    assert borders.starts(1, 3).tolist() == borders.starts(6, 99).tolist() == []
    assert borders_of_lengths([]).count == 0
    assert borders.positions.dtype == borders_of_lengths([]).positions.dtype == np.int64


def test_each_file_of_a_text_is_a_document_with_the_newline_that_follows_it(folder):
    source = opened("text", path=folder, validation_fraction=0.0)
    # "one\n", "\n", "hi\n" and nothing: 4 + 1 + 3 bytes; the last file is empty and no newline follows it.
    assert bytes(source.train.tokens[:]) == b"one\n\nhi\n"
    assert starts(source) == [0, 4, 5]
    assert source.corpus["documents"] == 3
    assert source.corpus["files"] == 4


def test_a_row_by_hand(folder):
    # "one\n", "\n", "hi\n" in rows of 4: (8 - 1) // 4 = 1. The newline's label would be the next document's first byte.
    rows = opened("text", path=folder, validation_fraction=0.0).train_rows(0, [0], 1)
    assert rows.tokens.tolist() == [[*b"one\n"]]
    assert rows.labels.tolist() == [[*b"ne\n", IGNORED]]
    assert rows.documents.tolist() == [[0, 0, 0, 0]]
    # In rows of 7, three documents: of "\n" alone no label is left.
    rows = opened("text", path=folder, validation_fraction=0.0, sequence=7).train_rows(0, [0], 1)
    assert rows.tokens.tolist() == [[*b"one\n\nhi"]]
    assert rows.labels.tolist() == [[*b"ne\n", IGNORED, IGNORED, *b"i\n"]]
    assert rows.documents.tolist() == [[0, 0, 0, 0, 1, 2, 2]]
    assert rows.documents.dtype == rows.labels.dtype == np.int32


def test_a_tokenizer_makes_a_document_of_each_file_that_gives_a_token(folder, tmp_path):
    words = Tokenizer(models.WordLevel({"one": 0, "hi": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    (folder / "a").write_text("one one hi")
    (folder / "c").write_text("hi one")
    keys = {"path": folder, "tokenizer": tmp_path / "words.json", "validation_fraction": 0.0}
    source = opened("text", **keys)
    # 3, 0, 2 and 0 tokens.
    assert source.train.tokens[:].tolist() == [0, 0, 1, 1, 0]
    assert starts(source) == [0, 3]
    rows = source.train_rows(0, [0], 1)
    assert rows.labels.tolist() == [[0, 1, IGNORED, 0]]
    assert rows.documents.tolist() == [[0, 0, 0, 1]]


def test_each_topic_of_english_is_a_document():
    source = opened("english")
    first, second, third = [len(topic.encode()) for topic in topics.values()][:3]
    assert starts(source)[:4] == [0, first + 1, first + second + 2, first + second + third + 3]
    assert source.corpus["documents"] == len(starts(source)) == len(topics)


@pytest.mark.parametrize("cached", [False, True])
def test_each_file_of_stdlib_is_a_document(tmp_path, cached):
    for _ in range(1 + cached):
        source = opened("stdlib", tmp_path if cached else None)
    text = bytes(source.train.tokens[:])
    places = starts(source)
    assert all(text[place - 1 : place] == b"\n" for place in places[1:])
    assert text.index((STDLIB / "argparse.py").read_bytes()) in places
    assert source.corpus["documents"] == len(places) == source.corpus["files"]


def test_ids_end_a_document_with_the_id_that_says_so(tmp_path):
    # 1 2 9 | 3 9 | 9 | 4 5 6 7 | nothing after the last 9.
    path = written(tmp_path, 1, 2, END, 3, END, END, 4, 5, 6, END)
    source = opened("tokens", path=path, document_end=END, validation_fraction=0.0, sequence=9)
    assert starts(source) == [0, 3, 5, 6]
    assert source.corpus["documents"] == 4
    rows = source.train_rows(0, [0], 1)
    assert rows.tokens.tolist() == [[1, 2, END, 3, END, END, 4, 5, 6]]
    assert rows.labels.tolist() == [[2, END, IGNORED, END, IGNORED, IGNORED, 5, 6, END]]
    assert rows.documents.tolist() == [[0, 0, 0, 1, 1, 2, 3, 3, 3]]


def test_ids_end_documents_across_the_chunks_that_a_file_is_read_in(tmp_path, monkeypatch):
    values = np.random.default_rng(0).integers(0, 4, 100)
    path = written(tmp_path, *values)
    expected = [0, *(place + 1 for place in range(99) if values[place] == 3)]
    for chunk in (1, 3, 7, 100):
        monkeypatch.setattr(token_file, "_CHUNK", chunk)
        assert starts(opened("tokens", path=path, document_end=3, sequence=9)) == expected


def test_documents_of_ids_are_kept_apart_for_each_end_and_until_the_file_changes(tmp_path):
    cache, path = tmp_path / "cache", written(tmp_path, *range(10), *range(10))
    keys = {"path": path, "validation_fraction": 0.0}
    for _ in range(2):
        assert starts(opened("tokens", cache, document_end=4, **keys)) == [0, 5, 15]
        assert starts(opened("tokens", cache, document_end=6, **keys)) == [0, 7, 17]
        assert opened("tokens", cache, pack=False, **keys).corpus["documents"] is None
    assert len(list(cache.iterdir())) == 3
    written(tmp_path, *range(10))
    assert starts(opened("tokens", cache, document_end=4, **keys)) == [0, 5]
    assert len(list(cache.iterdir())) == 3


def test_a_held_out_file_has_documents_of_its_own(tmp_path):
    path = written(tmp_path, 1, END, 2, 3, 4)
    (tmp_path / "val").mkdir()
    held_out = written(tmp_path / "val", 5, 6, END, 7)
    source = opened("tokens", path=path, validation_path=held_out, document_end=END)
    assert (source.corpus["documents"], source.corpus["validation"]["documents"]) == (2, 2)
    rows = source.validation_rows(0, [0, 1], 2)
    # 4 tokens have 3 labels, one of them across the border; padding, and the row that fills the batch, begin nothing.
    assert rows.labels.tolist() == [[6, END, IGNORED, IGNORED], [IGNORED] * 4]
    assert rows.documents.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0]]


def test_padding_continues_the_last_document():
    # 10 tokens, documents at 0, 2, 5 and 7. Validation is 4..9, that is 5 labels in rows of 4: the second row is token 8.
    source = packed(np.arange(10, dtype=np.uint8), ListedBorders(np.array([0, 2, 5, 7])), 4, border=4)
    rows = source.validation_rows(0, range(3), 3)
    assert rows.tokens.tolist() == [[4, 5, 6, 7], [8, 0, 0, 0], [0, 0, 0, 0]]
    assert rows.labels.tolist() == [[IGNORED, 6, IGNORED, 8], [9, IGNORED, IGNORED, IGNORED], [IGNORED] * 4]
    assert rows.documents.tolist() == [[0, 1, 1, 2], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_synthetic_documents_are_64_tokens_long_on_average_and_computed_where_asked_for():
    borders = synthetic_corpus(0, 257).borders
    assert borders is not None
    assert borders.count is None
    places = borders.starts(10**6, 10**6 + 2**20)
    # 2**20 draws of chance 1 / 64: mean 16,384, standard deviation sqrt(16,384 x 63 / 64) = 127; five of them.
    assert abs(len(places) - 16384) < 635
    assert (np.diff(places) > 0).all()
    part = borders.starts(10**6 + 1000, 10**6 + 2000)
    assert part.tolist() == [place for place in places if 10**6 + 1000 <= place < 10**6 + 2000]
    other = synthetic_corpus(1, 257).borders
    assert other is not None
    assert other.starts(10**6, 10**6 + 2**20).tolist() != places.tolist()


def test_synthetic_documents_never_change():
    borders = synthetic_corpus(0, 257).borders
    assert borders is not None
    assert borders.starts(0, 512).tolist() == [29, 41, 96, 332, 344, 433, 457, 467, 501, 511]


def by_the_whole_stream(tokens: np.ndarray, begins: set[int], first: int, valid: int, sequence: int):
    """Labels and documents of a row, token by token, from each token's document in the stream."""
    document_of = np.cumsum([place in begins for place in range(len(tokens))])
    places = range(first, first + valid)
    labels = [int(tokens[at + 1]) if document_of[at + 1] == document_of[at] else IGNORED for at in places]
    documents = [int(document_of[at] - document_of[first]) for at in places]
    rest = sequence - valid
    return labels + [IGNORED] * rest, documents + [documents[-1]] * rest


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("sequence", [1, 2, 3, 7, 16, 61])
@pytest.mark.parametrize("mean", [1, 2, 5, 40])
def test_packed_rows_agree_with_the_whole_stream(mean, sequence, ragged):
    random = np.random.default_rng([mean, sequence])
    tokens = random.integers(0, 1000, 400).astype(np.uint16)
    begins = np.flatnonzero(random.random(400) < 1 / mean)
    keys = {"border": 250, "shuffle": True, "ragged": ragged, "seed": mean}
    source = packed(tokens, ListedBorders(begins), sequence, **keys)
    unpacked = packed(tokens, None, sequence, **keys)
    train, held_out = source.num_train_samples, source.num_validation_samples
    for split, rows, plain in [
        (source.train, source.train_rows(1, range(train), train), unpacked.train_rows(1, range(train), train)),
        (source.validation, *(one.validation_rows(0, range(held_out), held_out) for one in (source, unpacked))),
    ]:
        assert (rows.tokens == plain.tokens).all()
        assert (rows.samples == plain.samples).all()
        for row, sample in enumerate(rows.samples.tolist()):
            first, valid = split.start + sample % split.num_samples(sequence) * sequence, (plain.labels[row] != IGNORED).sum()
            labels, documents = by_the_whole_stream(tokens, set(begins.tolist()), first, valid, sequence)
            assert rows.labels[row].tolist() == labels
            assert rows.documents[row].tolist() == documents


def test_processes_that_share_a_packed_batch_agree_on_its_documents():
    source = opened("synthetic", sequence=128, ragged=True)
    batch = source.train_rows(3, range(8), 8)
    assert batch.documents is not None
    assert batch.documents.max() > 0
    for rows in ([0, 1, 2], [5], [7, 2]):
        part = source.train_rows(3, rows, 8)
        assert (part.documents == batch.documents[rows]).all()
        assert (part.labels == batch.labels[rows]).all()


def test_rows_that_are_ignored_keep_their_documents():
    rows = opened("synthetic", sequence=128).train_rows(0, range(4), 4)
    emptied = rows.ignoring([1, 2])
    assert emptied.documents is rows.documents
    assert (emptied.labels[1:3] == IGNORED).all()


@pytest.mark.parametrize("source", ["synthetic", "stdlib", "english"])
def test_packing_changes_nothing_but_labels_across_borders_and_the_documents(source):
    with_it, without = opened(source, sequence=512), opened(source, sequence=512, pack=False)
    assert with_it.corpus == without.corpus
    rows, plain = with_it.train_rows(2, range(16), 16), without.train_rows(2, range(16), 16)
    assert plain.documents is None
    assert (rows.tokens == plain.tokens).all()
    assert (rows.samples == plain.samples).all()
    assert ((rows.labels == plain.labels) | (rows.labels == IGNORED)).all()


def test_rows_without_packing_never_change():
    # A change of these values changes every run ever made: do not update them, restore the rows.
    source = opened("synthetic", vocab=50257, sequence=64, ragged=True, pack=False)
    rows = source.train_rows(11, range(32), 32)
    content = b"".join(part.tobytes() for part in (rows.tokens, rows.labels, rows.samples))
    assert hashlib.sha256(content).hexdigest() == "9d7021c7e8468b218eaf2c31de96634c9e31b3e7f0ed69c7ceb9ecb9e4967708"
