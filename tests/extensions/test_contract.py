"""The contract, check by check, for the plugins that the host brings itself."""

from rlhf_authoring import (
    agent_contract,
    extension_contract,
    tasks_contract,
    tracker_contract,
    weight_sync_contract,
)

TestKLInReward = extension_contract("kl", {"coef": 0.1})
TestKLInLoss = extension_contract("kl", {"coef": 0.1, "place": "loss", "controller": "adaptive"})
TestSingleTurn = agent_contract("single_turn")
TestArithmetic = tasks_contract("arithmetic", {"digits": 1, "operations": "+-", "held_out": 20})
TestConsole = tracker_contract("console")
TestJsonLines = tracker_contract("jsonl")
TestInProcess = weight_sync_contract("in_process")
