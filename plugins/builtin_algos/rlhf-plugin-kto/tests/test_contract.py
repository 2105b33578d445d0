"""The host's contract, check by check, for KTO and DRO."""

from rlhf_authoring import algorithm_contract

TestKTO = algorithm_contract("kto")
TestWeights = algorithm_contract("kto", {"desirable_weight": 1.5, "undesirable_weight": 0.5})
TestDRO = algorithm_contract("dro_v")
TestDROStrict = algorithm_contract("dro_v", {"tau": 0.1})
