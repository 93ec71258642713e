"""The hash gives the same integers in Python, numpy and torch, and they never change between versions."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isoscale.data.hashing import derive_key, fold, mix

WORDS = st.integers(0, 2**32 - 1)
VALUES = st.integers(0, 2**62 - 1)

PINNED_KEYS = [
    ((0, "order"), (1162836003, 2656665218)),
    ((0, "order", 0), (3946176670, 638216983)),
    ((0,), (2642226052, 1977601347)),
    ((-1, "drop"), (164261846, 3946618408)),
    ((2**63, "a", "b"), (3525472248, 1230323403)),
]
PINNED_MIXES = [
    (0, 0),
    (1, 1753845952),
    (2, 3507691905),
    (0xFFFFFFFF, 1734902346),
    (0x9E3779B9, 33350994),
    (123456789, 2834422664),
]
PINNED_FOLDS = [
    (0, 0, 2926543089),
    (0, 1, 2385989600),
    (1, 0, 587614100),
    (0xFFFFFFFF, 0xFFFFFFFF, 3937528077),
    (12345, 2**32, 1990322963),
    (12345, 2**32 + 1, 3337230463),
    (7, 2**62 - 1, 1736366134),
]


@pytest.mark.parametrize(("words", "expected"), PINNED_KEYS)
def test_the_values_of_derived_keys_never_change(words, expected):
    assert derive_key(*words) == expected


@pytest.mark.parametrize(("word", "expected"), PINNED_MIXES)
def test_the_values_of_mix_never_change(word, expected):
    assert mix(word) == expected


@pytest.mark.parametrize(("word", "value", "expected"), PINNED_FOLDS)
def test_the_values_of_fold_never_change(word, value, expected):
    assert fold(word, value) == expected


@given(st.lists(WORDS, min_size=1))
def test_mix_is_the_same_in_python_numpy_and_torch(words):
    expected = [mix(word) for word in words]
    assert mix(np.array(words)).tolist() == expected
    assert mix(torch.tensor(words)).tolist() == expected


@given(WORDS, st.lists(VALUES, min_size=1))
def test_fold_is_the_same_in_python_numpy_and_torch(word, values):
    expected = [fold(word, value) for value in values]
    assert fold(word, np.array(values)).tolist() == expected
    assert fold(word, torch.tensor(values)).tolist() == expected
    assert fold(torch.tensor(word), torch.tensor(values)).tolist() == expected


def test_mix_sends_different_words_to_different_words():
    words = torch.cat([torch.arange(2**18), torch.arange(2**32 - 2**18, 2**32)])
    mixed = mix(words)
    assert mixed.unique().numel() == words.numel()
    assert mixed.min() >= 0 and mixed.max() < 2**32


def test_every_bit_of_a_word_moves_about_half_of_the_bits_of_its_mix():
    words = torch.arange(0, 2**32, 2**20 + 7)
    for bit in range(32):
        moved = mix(words) ^ mix(words ^ (1 << bit))
        share = sum(((moved >> place) & 1).double().mean().item() for place in range(32)) / 32
        assert 0.45 < share < 0.55


@pytest.mark.parametrize("bit", [0, 31, 32, 45, 61])
def test_fold_takes_all_62_bits_of_a_value(bit):
    values = torch.arange(1000)
    assert (fold(9, values) != fold(9, values ^ (1 << bit))).all()


def test_keys_differ_by_seed_by_purpose_and_by_where_words_end():
    keys = [derive_key(0, "a"), derive_key(1, "a"), derive_key(0, "b"), derive_key(0, "a", "b"), derive_key(0, "ab")]
    assert len({word for key in keys for word in key}) == 2 * len(keys)
