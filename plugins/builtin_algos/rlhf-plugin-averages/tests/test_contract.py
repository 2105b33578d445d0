"""The host's contract, check by check."""

from rlhf_authoring import extension_contract

TestEMA = extension_contract("ema")
TestMovingReference = extension_contract("moving_reference", {"share": 1.0, "every": 3})
