"""The checksum of files equals zlib's, whatever the data's size and kind."""

import mmap
import zlib

import numpy as np
import pytest

from tierbed.engine.checksum import crc32

SIZES = [0, 1, 7, 8, 15, 16, 17, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097, 5 * 1024, 5 * 1024 + 1, 1 << 20]


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8).data])
def test_the_checksum_is_zlibs_at_each_boundary(make):
    data = np.random.default_rng(0).bytes(SIZES[-1] + 3)
    for size in SIZES:
        for start in range(4):
            piece = make(data[start : start + size])
            assert crc32(piece) == zlib.crc32(piece)
            assert crc32(piece, 0xFFFFFFFF) == zlib.crc32(piece, 0xFFFFFFFF)


def test_pieces_have_the_checksum_of_the_whole():
    data, checksum = np.random.default_rng(1).bytes(100_003), 0
    for begin in range(0, len(data), 7_001):
        checksum = crc32(data[begin : begin + 7_001], checksum)
    assert checksum == zlib.crc32(data)


@pytest.mark.slow
def test_the_checksum_covers_more_than_4_gib():
    with mmap.mmap(-1, (1 << 32) + 4099, flags=mmap.MAP_PRIVATE) as data:  # unwritten pages take no memory
        data[-1] = data[1 << 32] = 1
        with memoryview(data) as view:
            assert crc32(view) == zlib.crc32(view)
