"""The small formats around a message: properties, topics, hosts, message ids, batches."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brokerlab.storage.errors import CorruptRecordError
from brokerlab.storage.message import (
    BatchItem,
    decode_batch,
    decode_message_id,
    decode_properties,
    encode_batch,
    encode_message_id,
    encode_properties,
    format_host,
    java_int,
    join_properties,
    pack_host,
    property_value,
    topic_bytes,
    topic_problem,
    unpack_host,
)
from tests.storage.strategies import INT, LONG, batch_items, hosts, messy_properties, property_maps

# Properties


@settings(deadline=None)
@given(property_maps, st.booleans())
def test_properties_come_back_in_both_trailing_styles(pairs: dict[str, str], trailing: bool) -> None:
    wire = encode_properties(pairs, trailing=trailing)

    assert decode_properties(wire) == pairs
    assert wire.endswith(b"\x02") == (trailing and bool(pairs))


def test_the_wire_form_is_that_of_the_original() -> None:
    assert encode_properties({"TAGS": "TagA", "KEYS": "k1"}) == bytes.fromhex("544147530154616741024B455953016B3102")
    assert encode_properties({"a": "1"}, trailing=False) == b"a\x011"
    assert encode_properties({}) == b""


@pytest.mark.parametrize(
    ("wire", "expected"),
    [
        (b"", {}),
        (b"\x02\x02", {}),
        (b"a\x01\x02b\x012", {"b": "2"}),
        (b"\x011\x02b\x012", {"b": "2"}),
        (b"plain\x02b\x012", {"b": "2"}),
        (b"a\x011\x02a\x012\x02", {"a": "2"}),
        (b"a\x011\x02a\x01\x02", {"a": "1"}),
        (b"a\x01b\x01c\x02", {"a": "b\x01c"}),
        (b"a\x01\xff\x02", {"a": "\ufffd"}),
    ],
)
def test_malformed_items_vanish_and_the_last_duplicate_stays(wire: bytes, expected: dict[str, str]) -> None:
    assert decode_properties(wire) == expected


@pytest.mark.parametrize("pair", [("", "v"), ("n\x01", "v"), ("n", "v\x02"), ("n\x02", "v"), ("n", "\x01")])
def test_what_cannot_be_escaped_is_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="escaped"):
        encode_properties(dict([pair]))


@settings(deadline=None)
@given(st.one_of(st.binary(max_size=100), messy_properties))
def test_any_bytes_decode_to_some_properties(wire: bytes) -> None:
    found = decode_properties(wire)

    assert all(name and value for name, value in found.items())


@settings(deadline=None)
@given(messy_properties, st.sampled_from(["KEYS", "TAGS", "UNIQ_KEY", "a", "é"]))
def test_one_value_is_found_as_if_all_were_decoded(wire: bytes, name: str) -> None:
    value = property_value(wire, name.encode())

    assert (None if value is None else value.decode("utf-8", "replace")) == decode_properties(wire).get(name)


@settings(deadline=None)
@given(messy_properties, st.dictionaries(st.sampled_from(["TAGS", "KEYS", "x"]), st.just("env"), min_size=1))
def test_the_envelope_of_a_batch_wins(own: bytes, envelope: dict[str, str]) -> None:
    joined = decode_properties(join_properties(own, encode_properties(envelope)))

    assert joined == decode_properties(own) | envelope


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"3", 3), (b"-3", -3), (b"+3", 3), (b"007", 7), (b"2147483647", 2**31 - 1), (b"-2147483648", -(2**31)),
        (b"2147483648", None), (b"", None), (b"-", None), (b"3x", None), (b" 3", None), (b"1_0", None),
        (b"\xd9\xa3", None), (b"9" * 5000, None),
    ],
)  # fmt: skip
def test_numbers_are_read_as_java_reads_them(text: bytes, expected: int | None) -> None:
    assert java_int(text) == expected


# Topics


@pytest.mark.parametrize(
    ("topic", "problem"),
    [
        (b"", "is empty"),
        (b".", "directory name"),
        (b"..", "directory name"),
        (b"a/b", "directory name"),
        (b"a\0", "directory name"),
        (b"\xff", "UTF-8"),
        (b"t" * 256, "256 bytes"),
    ],
)
def test_a_topic_must_be_usable_as_a_directory(topic: bytes, problem: str) -> None:
    assert problem in topic_problem(topic)


def test_a_usable_topic_has_no_problem() -> None:
    assert [topic_problem(topic) for topic in (b"t", b"...", b"%RETRY%g", "主题".encode(), b"t" * 255)] == [""] * 5
    assert topic_bytes("主题") == "主题".encode()
    with pytest.raises(ValueError, match="not valid Unicode"):
        topic_bytes("\ud800")
    with pytest.raises(ValueError, match="directory name"):
        topic_bytes("../up")


# Hosts and message ids


@settings(deadline=None)
@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)), st.integers(0, 2**31 - 1))
def test_a_host_comes_back(address: object, port: int) -> None:
    packed = pack_host(str(address), port)

    assert unpack_host(packed) == (str(address), port)
    assert len(packed) in (8, 20)


@settings(deadline=None)
@given(st.binary(max_size=30))
def test_any_bytes_are_a_host_or_are_refused(data: bytes) -> None:
    if len(data) in (8, 20):
        assert unpack_host(data)[1] == struct.unpack(">i", data[-4:])[0]
    else:
        with pytest.raises(CorruptRecordError, match="8 or 20"):
            unpack_host(data)


def test_hosts_are_shown_as_people_write_them() -> None:
    assert format_host(pack_host("192.168.1.20", 10911)) == "192.168.1.20:10911"
    assert format_host(pack_host("fe80::1", 80)) == "[fe80::1]:80"
    for address, port in (("host", 1), ("1.2.3.4", -1), ("1.2.3.4", 2**31)):
        with pytest.raises(ValueError):
            pack_host(address, port)


def test_the_message_id_of_the_test_vector() -> None:
    host = pack_host("192.168.1.20", 10911)

    assert encode_message_id(host, 0) == "C0A8011400002A9F0000000000000000"
    assert decode_message_id("C0A8011400002A9F0000000000000000") == (host, 0)
    assert decode_message_id("c0a8011400002a9f0000000000000000") == (host, 0)


@settings(deadline=None)
@given(hosts, LONG)
def test_a_message_id_comes_back(host: bytes, offset: int) -> None:
    text = encode_message_id(host, offset)

    assert decode_message_id(text) == (host, offset)
    assert len(text) == 2 * len(host) + 16
    assert text == text.upper()


@settings(deadline=None)
@given(hosts, LONG, st.data())
def test_no_prefix_of_a_message_id_is_taken_for_another(host: bytes, offset: int, data: st.DataObject) -> None:
    text = encode_message_id(host, offset)
    length = data.draw(st.integers(0, len(text) - 1).filter(lambda n: n != 32))

    with pytest.raises(CorruptRecordError):
        decode_message_id(text[:length])


@settings(deadline=None)
@given(st.one_of(st.text(max_size=60), st.text("0123456789abcdefG٣é ", min_size=32, max_size=32)))
def test_any_text_is_a_message_id_or_is_refused(text: str) -> None:
    try:
        host, offset = decode_message_id(text)
    except CorruptRecordError as error:
        assert "message id" in str(error)
    else:
        assert encode_message_id(host, offset) == text.upper()


# Batches


@settings(deadline=None)
@given(st.lists(batch_items, max_size=6))
def test_a_batch_comes_back(items: list[BatchItem]) -> None:
    assert decode_batch(encode_batch(items)) == items


def test_the_batch_layout_is_that_of_the_original() -> None:
    wire = encode_batch([BatchItem(b"hi", b"a\x011\x02", 7)])

    assert wire == bytes.fromhex("0000001C 00000000 00000000 00000007 00000002 6869 0004 61013102")


@settings(deadline=None)
@given(st.lists(batch_items, min_size=1, max_size=4))
def test_a_prefix_of_a_batch_is_torn_unless_it_ends_with_an_item(items: list[BatchItem]) -> None:
    wire = encode_batch(items)
    ends = {len(encode_batch(items[:count])): count for count in range(len(items) + 1)}

    for length in range(len(wire)):
        if length in ends:
            assert decode_batch(wire[:length]) == items[: ends[length]]
        else:
            with pytest.raises(CorruptRecordError) as caught:
                decode_batch(wire[:length])
            assert caught.value.torn


@settings(deadline=None)
@given(st.lists(batch_items, min_size=1, max_size=3), st.data())
def test_a_batch_item_with_another_total_or_properties_length_is_refused(
    items: list[BatchItem], data: st.DataObject
) -> None:
    """These two lengths are all that a batch protects."""
    wire = bytearray(encode_batch(items))
    last_at = len(wire) - len(items[-1].properties) - 2
    place = data.draw(st.sampled_from([0, 1, 2, 3, last_at, last_at + 1]))
    wire[place] ^= data.draw(st.integers(1, 255))

    with pytest.raises(CorruptRecordError):
        decode_batch(bytes(wire))


@settings(deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=30), INT.map(lambda n: struct.pack(">i", n))), max_size=12))
def test_any_bytes_are_a_batch_or_are_refused(parts: list[bytes]) -> None:
    wire = b"".join(parts)
    try:
        items = decode_batch(wire)
    except CorruptRecordError as error:
        assert 0 <= (error.offset or 0) < len(wire)
    else:
        assert sum(22 + len(item.body) + len(item.properties) for item in items) == len(wire)


@pytest.mark.parametrize(
    ("total", "body_length"), [(2**31 - 1, 0), (2**31 - 1, 2**31 - 23), (-1, 0), (21, 0), (22, 1), (22, -1), (0, 0)]
)
def test_a_length_is_never_believed(total: int, body_length: int) -> None:
    wire = struct.pack(">iiiii", total, 0, 0, 0, body_length) + bytes(10)

    with pytest.raises(CorruptRecordError):
        decode_batch(wire)
