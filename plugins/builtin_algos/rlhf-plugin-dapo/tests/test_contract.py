"""The host's contract, check by check, for DAPO's extensions."""

from rlhf_authoring import extension_contract

TestDynamicFiltering = extension_contract("dynamic_filtering")
TestOverlongPenalty = extension_contract("overlong_penalty", {"buffer": 4})
TestOverlongMasking = extension_contract("overlong_masking")
TestStopProperly = extension_contract("stop_properly", {"coef": 0.5})
