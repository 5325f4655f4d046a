"""The shuffled order: a bijection in each epoch, the same for ever, and evenly spread."""

import hashlib

import numpy as np
import pytest

from scaling_lab.data.order import below, counter_hash, key_for, shuffled


def order(size: int, epoch: int = 0, seed: int = 0) -> np.ndarray:
    index = np.arange(size)
    return shuffled(index, np.full(size, epoch), size, seed)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 17, 64, 97, 1000, 4096, 4097, 104729])
@pytest.mark.parametrize("epoch", [0, 1, 12345])
def test_every_index_appears_exactly_once_in_an_epoch(size, epoch):
    assert sorted(order(size, epoch).tolist()) == list(range(size))


def test_the_order_never_changes():
    # A change of these values reorders every run ever made: do not update them, restore the order.
    assert order(10).tolist() == [1, 3, 8, 6, 4, 9, 5, 2, 0, 7]
    three_epochs = np.concatenate([order(1000, epoch, seed=7) for epoch in range(3)]).astype("<i8")
    assert (
        hashlib.sha256(three_epochs.tobytes()).hexdigest() == "811fbcdb489ad07218ed07570c7b38d0f1c72cd52a2d447f4b97a33f3429e1d0"
    )


def test_any_index_can_be_asked_for_alone():
    whole = order(1009, epoch=3, seed=5)
    alone = [shuffled(np.array([index]), np.array([3]), 1009, 5)[0] for index in range(0, 1009, 50)]
    assert alone == whole[::50].tolist()


def test_a_huge_corpus_costs_nothing_to_open():
    size = 2**45 - 1
    places = shuffled(np.array([0, 1, size - 1]), np.zeros(3, np.int64), size, 0)
    assert len(set(places.tolist())) == 3
    assert (places >= 0).all()
    assert (places < size).all()


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [order(500, epoch, seed).tolist() for epoch, seed in [(0, 0), (1, 0), (0, 1), (1, 1)]]
    assert len({tuple(one) for one in orders}) == 4
    # Two independent permutations share 1 fixed place on average; 10 has a chance of about 1e-7.
    for one in orders[1:]:
        assert sum(a == b for a, b in zip(orders[0], one, strict=True)) < 10


@pytest.mark.parametrize("size", [2, 3, 5, 12])
def test_each_place_is_equally_likely(size):
    epochs = 6000
    first = shuffled(np.zeros(epochs, np.int64), np.arange(epochs), size, 0)
    counts = np.bincount(first, minlength=size)
    # Binomial: mean epochs / size, standard deviation below its square root; five of them.
    assert (abs(counts - epochs / size) < 5 * np.sqrt(epochs / size)).all()


def test_neighbours_do_not_stay_neighbours():
    step = np.diff(order(10000))
    # Independent places differ by exactly 1 with a chance of 2 / 10,000 each: about 2 among 9,999.
    assert (abs(step) == 1).sum() < 12


def test_the_hash_is_splitmix64():
    # The generator's published first outputs from state 1234567 (rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64).
    bits = counter_hash(np.uint64(1234567), np.arange(3))
    assert bits.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_purposes_never_share_a_stream():
    assert key_for(0, "order") != key_for(0, "synthetic") != key_for(1, "order")


def test_bounded_numbers_cover_their_range_evenly():
    values = below(counter_hash(key_for(0, "test"), np.arange(257 * 400)), 257)
    counts = np.bincount(values, minlength=257)
    assert len(counts) == 257
    # Mean 400, standard deviation 20; five of them either way.
    assert counts.min() > 300
    assert counts.max() < 500
