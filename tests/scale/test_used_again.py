"""Memory that is used again belongs to one array at a time."""

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafl.scale import used_again
from deltafl.scale.used_again import new_array, new_like


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> used_again._Blocks:
    """Arrays of 64 bytes are long, and nobody else's are there."""
    monkeypatch.setattr(used_again, "LONG", 64)
    fresh = used_again._Blocks()
    monkeypatch.setattr(used_again, "_BLOCKS", fresh)
    return fresh


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def test_an_array_that_is_gone_leaves_its_memory_to_the_next(blocks: used_again._Blocks) -> None:
    stays = new_array((4, 8), np.float32)
    first = new_like(stays)
    view = first[1:, ::2]
    where = address(first)
    del first
    # The view holds it.
    assert address(new_array((4, 8), np.float32)) != where
    del view
    assert address(new_array(16)) == where


@given(steps=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([8, 16, 24])), max_size=60))
def test_no_two_arrays_share_memory(steps: list[tuple[int, int]]) -> None:
    before = used_again.LONG, used_again._BLOCKS
    used_again.LONG = 64
    used_again._BLOCKS = used_again._Blocks()
    try:
        held = []
        for number, (drop, size) in enumerate(steps):
            array = new_array(size)
            array[:] = number
            held.append((number, array[::2]))
            del array
            if drop == 0:
                held.pop(number % len(held))
            for was, view in held:
                assert (view == was).all()
    finally:
        used_again.LONG, used_again._BLOCKS = before


def test_who_lets_go_of_all_arrays_gets_all_memory_back(blocks: used_again._Blocks) -> None:
    held = [new_array(size) for size in (8, 16, 32, 64)]
    del held[1:3]
    # 576 bytes are used.
    assert sum(block.nbytes for block in blocks._kept.values()) == 384
    del held[1]
    assert sum(block.nbytes for block in blocks._kept.values()) <= 96
    held.clear()
    gc.collect()
    assert not blocks._kept
    assert not blocks._used


def test_threads_get_different_memory(blocks: used_again._Blocks) -> None:
    def fill(number: int) -> bool:
        for _ in range(200):
            array = new_array(16)
            array[:] = number
            assert (array == number).all()
        return True

    stay = [new_array(16) for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(fill, range(4)))
    assert len(blocks._used) == len(stay)


def test_arrays_are_like_others(blocks: used_again._Blocks) -> None:
    array = new_array((3, 8))
    array[:] = 2.5
    assert array.flags.writeable
    assert array.flags.c_contiguous
    np.testing.assert_array_equal(copy.deepcopy(array), np.full((3, 8), 2.5))
    assert new_array(7).base is None
