"""CRC-32 against an independent implementation, and what is said when a fast one is missing."""

from __future__ import annotations

import subprocess
import sys
import zlib

import crcmod
from hypothesis import given, settings
from hypothesis import strategies as st

from brokerlab.storage import checksum

reference_crc32 = crcmod.mkCrcFun(0x104C11DB7, initCrc=0, xorOut=0xFFFFFFFF)

WITHOUT_ISAL = "import sys; sys.modules['isal'] = None; "
WITHOUT_EXTENSION = "import sys; sys.modules['crcmod._crcfunext'] = None; "
SAY = "from brokerlab.storage import checksum as c; "


def output_of(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@settings(deadline=None)
@given(st.binary(max_size=3000))
def test_crc32_agrees_with_an_independent_implementation(data: bytes) -> None:
    assert checksum.crc32(data) == reference_crc32(data) == zlib.crc32(data)


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_the_body_crc_keeps_31_bits(body: bytes) -> None:
    assert checksum.body_crc(body) == reference_crc32(body) & 0x7FFFFFFF


def test_the_check_values_of_the_standards() -> None:
    assert checksum.crc32(b"123456789") == 0xCBF43926
    assert checksum.crc32c(b"123456789") == 0xE3069283
    assert checksum.body_crc(b"123456789") == 0x4BF43926
    assert checksum.body_crc(b"") == 0


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_view_of_the_bytes_has_their_crc(data: bytes) -> None:
    padded = b"x" + data + b"y"

    assert checksum.crc32(memoryview(padded)[1:-1]) == checksum.crc32(bytearray(data)) == checksum.crc32(data)


def test_isal_is_used_where_it_is_installed() -> None:
    assert checksum.CRC32_IMPLEMENTATION == "isal"
    assert checksum.describe().startswith("CRC-32 by isal")


def test_without_isal_zlib_computes_the_same() -> None:
    said = output_of(
        WITHOUT_ISAL + SAY + "print(c.CRC32_IMPLEMENTATION, c.crc32(b'123456789'), c.body_crc(b'123456789'))"
    )

    assert said == f"zlib {0xCBF43926} {0x4BF43926}"


def test_a_compiled_crcmod_is_recognised() -> None:
    assert checksum.CRCMOD_IS_COMPILED is True
    assert "WITHOUT" not in checksum.describe()


def test_a_crcmod_without_its_extension_is_noticed_and_still_right() -> None:
    said = output_of(WITHOUT_EXTENSION + SAY + "print(c.CRCMOD_IS_COMPILED, hex(c.crc32c(b'123456789')), c.describe())")

    assert said.startswith("False 0xe3069283 ")
    assert "WITHOUT its C extension" in said
