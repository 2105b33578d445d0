"""The contract, check by check, for the plugins that the host brings itself."""

from rlhf_host.testing import agent_contract, extension_contract

TestKLInReward = extension_contract("kl", {"coef": 0.1})
TestKLInLoss = extension_contract("kl", {"coef": 0.1, "place": "loss", "controller": "adaptive"})
TestSingleTurn = agent_contract("single_turn")
