"""Steps as people write them."""

from __future__ import annotations

import pytest
from rlhf_profile.plugin import Profile
from rlhf_profile.steps import Steps


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("3,10-12", "3,10-12"),
        (3, "3"),
        ([3, "10-12"], "3,10-12"),
        ("12-14, 3,13-20,21", "3,12-21"),
        ("1-1000000000", "1-1000000000"),
    ],
)
def test_flags_and_files_say_the_same(value, written):
    assert Profile.Options(steps=value).steps == written


@pytest.mark.parametrize("value", ["", "0", "5-3", "a", "3,,4", "-3", "1.5", True, 1.5, [], [0], None])
def test_what_is_no_list_of_steps_is_refused(value):
    with pytest.raises(ValueError, match="steps"):
        Profile.Options(steps=value)


def test_settings_of_torch_without_torch_are_refused():
    with pytest.raises(ValueError, match=r"(?s)memory.*this is a setting of torch's profiler, and profile.torch is false"):
        Profile.Options(steps="1", torch=False, memory=True)


def test_steps_that_are_left_are_named():
    steps = Steps("3,10-12,20")
    assert [step for step in range(30) if step in steps] == [3, 10, 11, 12, 20]
    assert steps.without({3, 11}) == "10,12,20"
    assert steps.without({3, 10, 11, 12, 20}) == ""
    assert steps.outside(4, 11) == "3,12,20"
    assert steps.outside(1, 20) == ""
    assert Steps("5-9").outside(7, 8) == "5-6,9"
