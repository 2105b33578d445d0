"""Names of our own in the code of tests."""

SETTLE, BEFORE, FIXED = "_rlhf_settle", "_rlhf_before", "_rlhf_fixed"
