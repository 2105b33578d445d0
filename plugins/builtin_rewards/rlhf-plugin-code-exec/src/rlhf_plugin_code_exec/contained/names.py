"""Names of our own in the code of tests."""

ALONE, FIXED, EQUAL, SIDES, CONTEXT = "_rlhf_alone", "_rlhf_fixed", "_rlhf_equal", "_rlhf_sides", "_rlhf_context"
OWN = (ALONE, FIXED, EQUAL, SIDES, CONTEXT)
