"""Java's String.hashCode: known values, a second implementation, and columns against single strings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brokerlab.storage.java_hash import ascii_hashes, index_hash, index_hashes, string_hash, tag_hash


def slow_hash(text: str) -> int:
    """The definition, by ctypes-like wrapping at every step."""
    hashed = 0
    raw = text.encode("utf-16-be", "surrogatepass")
    for at in range(0, len(raw), 2):
        hashed = (hashed * 31 + int.from_bytes(raw[at : at + 2], "big")) % 2**32
    return hashed - 2**32 if hashed >= 2**31 else hashed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("a", 97),
        ("TagA", 2598919),
        ("refund", -934813832),
        ("é", 233),
        ("😀", 0xD83D * 31 + 0xDE00),
        ("\ud83d", 0xD83D),
        ("polygenelubricants", -(2**31)),
    ],
)
def test_known_hashes(text: str, expected: int) -> None:
    assert string_hash(text) == tag_hash(text) == expected


@settings(deadline=None)
@given(st.text(st.characters(), max_size=40))
def test_any_text_is_hashed_by_its_utf_16_units(text: str) -> None:
    assert string_hash(text) == slow_hash(text)


@pytest.mark.parametrize("length", [1, 2, 511, 512, 513, 514, 2000])
@pytest.mark.parametrize("letter", ["z", "é"])
def test_long_texts_take_no_other_value(letter: str, length: int) -> None:
    assert string_hash(letter * length) == slow_hash(letter * length)


def test_the_index_hash_is_never_negative() -> None:
    assert index_hash("TopicTest", "k1") == 2746024
    assert slow_hash("a#k6") >= 0
    assert index_hash("orders", "refund-17") == abs(slow_hash("orders#refund-17"))
    assert index_hashes(np.array([5, -5, -(2**31), 2**31 - 1], dtype=np.int32)).tolist() == [5, 5, 0, 2**31 - 1]


def test_the_hash_that_java_cannot_negate_is_kept_as_zero() -> None:
    assert slow_hash("T#0jdpgE3") == -(2**31)

    assert index_hash("T", "0jdpgE3") == 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(st.characters(max_codepoint=127), max_size=30), st.text(max_size=10)), max_size=30))
def test_a_column_of_runs_has_the_hashes_of_the_single_strings(pairs: list[tuple[str, str]]) -> None:
    texts = [text for text, _ in pairs]
    data = np.frombuffer("".join(texts).encode() + b"#", dtype=np.uint8)
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    before = np.array([string_hash(front) for _, front in pairs], dtype=np.int32)

    assert ascii_hashes(data, starts, lengths).tolist() == [string_hash(text) for text in texts]
    assert ascii_hashes(data, starts, lengths, before).tolist() == [string_hash(front + text) for text, front in pairs]


@pytest.mark.parametrize("length", [510, 511, 512])
def test_the_longest_run_of_a_column_is_512_bytes(length: int) -> None:
    data = np.full(length, ord("q"), dtype=np.uint8)
    before = np.array([string_hash("topic#")], dtype=np.int32)

    hashes = ascii_hashes(data, np.array([0]), np.array([length]), before)

    assert hashes.tolist() == [slow_hash("topic#" + "q" * length)]
