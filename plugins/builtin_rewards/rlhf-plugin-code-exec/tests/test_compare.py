"""Right results: one rule for what is printed and what is returned."""

from decimal import Decimal
from fractions import Fraction

import pytest
from rlhf_plugin_code_exec.contained.compare import same, same_output


@pytest.mark.parametrize(
    ("result", "wanted", "right"),
    [
        (3, 3, True),
        (3.0, 3, True),
        (3.0000001, 3, False),
        (3, 3.0, True),
        (0.1 + 0.2, 0.3, True),
        (0.3001, 0.3, False),
        (1e12 + 1, 1e12, True),
        (1e-7, 0.0, True),
        (2e-6, 0.0, False),
        (5.0, float("inf"), False),
        (10**400, 1.5, False),
        (-3, 3, False),
        (10**30 + 1, 10**30, False),
    ],
)
def test_numbers_printed_and_returned(result, wanted, right):
    assert same(result, wanted) is right
    assert same_output(f"{result}\n", f"{wanted}") is right
    assert same([result], [wanted]) is right
    assert same_output(f"x {result} y\n", f"x {wanted} y") is right


@pytest.mark.parametrize(
    ("value", "wanted", "right"),
    [
        ((1, (2,)), [1, [2]], True),
        ({1: (2.0000000001,)}, {"1": [2.0]}, True),
        ({1: 2, "1": 2}, {"1": 2}, False),
        ({1: 2, "1": 3}, {"1": 2, "2": 3}, False),
        ({(1, 2): 3}, {"(1, 2)": 3}, True),
        ({None: 1, True: 2, 0.5: 3}, {"null": 1, "true": 2, "0.5": 3}, True),
        ({1, 2}, [1, 2], False),
        (range(2), [0, 1], False),
        ("ab", ["a", "b"], False),
        (True, True, True),
        (1, True, True),
        (None, None, True),
        (0, None, False),
        ("a ", "a", False),
        (Decimal("0.5"), 0.5, True),
        (Fraction(1, 2), 0.5, True),
        (float("nan"), float("nan"), True),
        (float("nan"), 1.5, False),
        ([1, 2], [1], False),
        ([], {}, False),
    ],
)
def test_returned_values(value, wanted, right):
    assert same(value, wanted) is right


@pytest.mark.parametrize(
    ("said", "wanted", "right"),
    [
        ("1.0000001 x\n", "1.0 x", True),
        ("1 y", "1 x", False),
        ("a  \nb\n\n", "a\nb", True),
        ("a b", "a\nb", False),
        ("007", "7", False),
        ("+7", "7", False),
        ("1_0", "10.0", False),
        ("nan", "0.5", False),
        ("0x10", "16.0", False),
        ("1e3", "1000", True),
        ("5", "1e999", False),
        ("1" * 5000 + ".0", "1" * 5000, True),
        ("", "", True),
        ("YES", "yes", False),
    ],
)
def test_printed_texts(said, wanted, right):
    assert same_output(said, wanted) is right
