"""C++'s random numbers: the values that the C++ standard and a C++ program give."""

from __future__ import annotations

import numpy as np
import pytest

from mt_data.datasets.mersenne_twister import Mt19937, Mt1993764, shuffle_order


def test_the_10000th_number_is_the_one_that_the_cpp_standard_states() -> None:
    assert int(Mt1993764(5489).draw(10_000)[-1]) == 9981545732273789042
    assert int(Mt19937(5489).draw(10_000)[-1]) == 4123659995


def test_numbers_are_those_of_a_cpp_program() -> None:
    first = Mt1993764(5489).draw(5)
    assert first.tolist() == [
        14514284786278117030,
        4620546740167642908,
        13109570281517897720,
        17462938647148434322,
        355488278567739596,
    ]
    later = Mt1993764(1235).draw(1003)[1000:]
    assert later.tolist() == [2397778034156394394, 1056984143972009500, 17844955565823969588]
    assert Mt19937(1234).draw(1003)[1000:].tolist() == [3796541357, 317699229, 3184119239]


def test_a_stream_does_not_depend_on_how_much_is_drawn_at_once() -> None:
    whole = Mt1993764(7).draw(2000)
    stream = Mt1993764(7)
    parts = [stream.draw(count) for count in (0, 1, 311, 312, 313, 700, 363)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 1000, (1 << 14) - 1, 1 << 14, (1 << 14) + 1, 50_000])
def test_shuffle_is_fisher_yates_one_swap_at_a_time(count: int) -> None:
    numbers = Mt1993764(99).draw(max(count - 1, 0)).tolist()
    expected = list(range(count))
    for number, row in zip(numbers, range(count - 1, 0, -1), strict=True):
        other = number % (row + 1)
        expected[row], expected[other] = expected[other], expected[row]
    assert shuffle_order(count, 99).tolist() == expected
