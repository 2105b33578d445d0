"""Parts of messages."""

import pytest

from rlhf_host.errors import beyond


@pytest.mark.parametrize(
    ("value", "limit", "text"),
    [
        (0.4, 0.1, "0.4, more than 0.1"),
        (1.004e-4, 1e-4, "0.0001004, more than 0.0001"),
        (0.1000000001, 0.1, "0.1000000001, more than 0.1"),
        (0.0996, 0.0994, "0.1, more than 0.0994"),
        (float("nan"), 0.1, "nan, more than 0.1"),
        (float("inf"), 0.1, "inf, more than 0.1"),
    ],
)
def test_a_figure_has_as_many_digits_as_tell_it_from_its_limit(value, limit, text):
    assert beyond(value, limit) == text
