"""Rows: windows by hand, splits that do not overlap, order, padding, raggedness, and any division among processes."""

import numpy as np
import pytest

from scaling_lab.data import IGNORED
from scaling_lab.data.source import Source, Split

TEXT = np.frombuffer(b"Simple is better than complex.", np.uint8)  # 30 bytes


def source(border=20, sequence=4, tokens=TEXT, seed=0, shuffle=False, ragged=False) -> Source:
    train, validation = Split(tokens, 0, border, True), Split(tokens, border, len(tokens), False)
    return Source({}, train, validation, sequence, seed, shuffle, ragged)


def text(row: np.ndarray) -> str:
    return bytes(row[row >= 0].tolist()).decode()


def test_windows_are_cut_where_the_arithmetic_says():
    # 20 training bytes "Simple is better tha", rows of 4: (20 - 1) // 4 = 4 samples, 16 labels; the last 3 bytes are left over.
    rows = source().train_rows(0, range(4), 4)
    assert source().num_train_samples == 4
    assert [text(row) for row in rows.tokens] == ["Simp", "le i", "s be", "tter"]
    assert [text(row) for row in rows.labels] == ["impl", "e is", " bet", "ter "]
    assert rows.samples.tolist() == [0, 1, 2, 3]
    assert (rows.tokens.dtype, rows.labels.dtype, rows.samples.dtype) == (np.int32, np.int32, np.int64)


def test_a_row_that_fits_exactly_is_used():
    # 21 bytes hold (21 - 1) // 4 = 5 rows: the fifth ends with the split's last byte, the 21st.
    rows = source(border=21).train_rows(0, range(5), 5)
    assert text(rows.tokens[4]) == " tha"
    assert text(rows.labels[4]) == "than"


def test_every_validation_label_counts_exactly_once():
    # 10 bytes "n complex." have 9 labels: ceil(9 / 4) = 3 windows, the last with one label; in batches of 2: ceil(3 / 2) = 2.
    held_out = source()
    assert held_out.num_validation_samples == 3
    assert held_out.validation_batches(2) == 2
    first, last = (held_out.validation_rows(batch, range(2), 2) for batch in range(2))
    labels = np.concatenate([first.labels, last.labels])
    assert [text(row) for row in labels] == [" com", "plex", ".", ""]
    assert (labels[2] == [ord("."), IGNORED, IGNORED, IGNORED]).all()
    assert last.tokens[0].tolist() == [ord("x"), 0, 0, 0]
    assert (labels[3] == IGNORED).all()
    assert (last.tokens[1] == 0).all()
    assert [*first.samples, *last.samples] == [0, 1, 2, -1]


def test_training_and_validation_share_no_token():
    ids = np.arange(1000, dtype=np.uint16)
    whole = source(border=900, sequence=7, tokens=ids, shuffle=True)
    train = whole.train_rows(0, range(whole.num_train_samples), whole.num_train_samples)
    held_out = whole.validation_rows(0, range(whole.num_validation_samples), whole.num_validation_samples)
    assert max(train.tokens.max(), train.labels.max()) < 900
    valid = held_out.labels[held_out.labels >= 0]
    assert sorted(valid.tolist()) == list(range(901, 1000))
    assert held_out.tokens[held_out.labels >= 0].min() == 900


def test_an_epoch_trains_every_label_once_in_a_shuffled_order():
    ids = np.arange(1 + 7 * 50, dtype=np.uint16)
    whole = source(border=len(ids), sequence=7, tokens=ids, shuffle=True)
    rows = [whole.train_rows(step, range(10), 10) for step in range(5)]
    labels = np.concatenate([part.labels for part in rows]).ravel()
    assert labels.tolist() != sorted(labels.tolist())
    assert sorted(labels.tolist()) == list(range(1, 351))
    assert sorted(np.concatenate([part.samples for part in rows]).tolist()) == list(range(50))


@pytest.mark.parametrize("shuffle", [False, True])
def test_sample_ids_are_unique_over_a_run_whose_batches_cross_epochs(shuffle):
    # 4 samples an epoch, batches of 6: a batch holds samples of two epochs; ids are epoch x 4 + window.
    rows = [source(shuffle=shuffle).train_rows(step, range(6), 6) for step in range(2)]
    ids = np.concatenate([part.samples for part in rows])
    assert sorted(ids.tolist()) == list(range(12))
    assert [sorted((ids[4 * epoch : 4 * epoch + 4] % 4).tolist()) for epoch in range(3)] == [[0, 1, 2, 3]] * 3
    for part in rows:
        assert [text(row) for row in part.tokens] == [["Simp", "le i", "s be", "tter"][id % 4] for id in part.samples]


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("ragged", [False, True])
def test_processes_that_share_a_batch_read_it_whole_and_each_row_once(processes, ragged):
    whole = source(border=30, sequence=3, shuffle=True, ragged=ragged, seed=11)
    for step in (0, 1, 7):
        batch = whole.train_rows(step, range(12), 12)
        size = 12 // processes
        parts = [whole.train_rows(step, range(p * size, (p + 1) * size), 12) for p in range(processes)]
        for field in ("tokens", "labels", "samples"):
            assert (np.concatenate([getattr(part, field) for part in parts]) == getattr(batch, field)).all()
        assert len(set(batch.samples.tolist())) == 12


def test_rows_come_in_the_order_asked_for():
    batch = source(shuffle=True).train_rows(5, range(8), 8)
    some = source(shuffle=True).train_rows(5, [6, 1, 1], 8)
    assert (some.tokens == batch.tokens[[6, 1, 1]]).all()
    assert (some.samples == batch.samples[[6, 1, 1]]).all()


def test_accumulation_and_resuming_see_the_same_samples():
    # Microbatches are slices of the step's rows, and a resumed job asks for its first step directly.
    uninterrupted = [source(shuffle=True).train_rows(step, range(4), 4).samples.tolist() for step in range(6)]
    resumed = source(shuffle=True)
    for step in (3, 4, 5):
        halves = [resumed.train_rows(step, rows, 4).samples.tolist() for rows in ([0, 1], [2, 3])]
        assert halves[0] + halves[1] == uninterrupted[step]


def test_only_the_asked_rows_are_read():
    class Recorder:
        def __init__(self):
            self.asked = []

        def __len__(self):
            return 10**12

        def __getitem__(self, part):
            self.asked.append((part.start, part.stop))
            return np.zeros(part.stop - part.start, np.uint8)

    tokens = Recorder()
    source(border=10**12, sequence=8, tokens=tokens).train_rows(1000, [3, 5], 16)
    # Samples 16,003 and 16,005 of 8 tokens each, one token more for the last label.
    assert tokens.asked == [(128024, 128033), (128040, 128049)]


def test_ragged_rows_keep_from_one_label_to_all_of_them():
    ids = np.arange(1, 8 * 400 + 2, dtype=np.uint16)
    rows = source(border=len(ids), sequence=8, tokens=ids, ragged=True).train_rows(0, range(400), 400)
    counts = (rows.labels != IGNORED).sum(1)
    assert set(counts.tolist()) == set(range(1, 9))
    # Uniform over 1..8: mean 4.5, standard deviation sqrt(63 / 12 / 400) = 0.115; five of them.
    assert abs(counts.mean() - 4.5) < 0.58
    valid = np.arange(8) < counts[:, None]
    assert ((rows.labels != IGNORED) == valid).all()
    assert (rows.tokens[~valid] == 0).all()
    assert (rows.labels[valid] == rows.tokens[valid] + 1).all()


def test_ragged_lengths_belong_to_the_sample_and_not_to_its_place():
    ids = np.arange(1, 8 * 50 + 2, dtype=np.uint16)
    in_order = source(border=len(ids), sequence=8, tokens=ids, ragged=True).train_rows(0, range(50), 50)
    mixed = source(border=len(ids), sequence=8, tokens=ids, ragged=True, shuffle=True).train_rows(0, range(50), 50)
    assert (mixed.labels == in_order.labels[mixed.samples]).all()


def test_chosen_rows_can_be_ignored_altogether():
    rows = source().train_rows(0, range(4), 4)
    emptied = rows.ignoring([1, 2])
    assert (emptied.labels != IGNORED).sum(1).tolist() == [4, 0, 0, 4]
    assert (emptied.tokens == rows.tokens).all()
    assert (rows.labels != IGNORED).all()
    assert rows.documents is emptied.documents is None


@pytest.mark.parametrize(("step", "rows"), [(-1, [0]), (0, [4]), (0, [-1])])
def test_a_row_outside_the_batch_is_refused(step, rows):
    with pytest.raises(ValueError, match="not within a global batch of 4 rows"):
        source().train_rows(step, rows, 4)
