"""The host's contract, check by check, for DPO, conservative DPO, IPO, CPO and TPO."""

from rlhf_authoring import algorithm_contract

TestDPO = algorithm_contract("dpo")
TestCDPO = algorithm_contract("cdpo", {"loss": "sigmoid"})
TestIPO = algorithm_contract("ipo", {"loss": "ipo"})
TestNoise = algorithm_contract("dpo", {"loss": "exo_pair", "label_smoothing": 0.1, "nll_coef": 0.5, "nll_mean": "rows"})
TestSimPO = algorithm_contract(
    "dpo", {"loss": "sigmoid_norm", "reference_free": True, "beta": 2.5, "gamma": 1.4, "nll_coef": 0.1}
)
TestCPO = algorithm_contract("cpo")
TestCPOSimPO = algorithm_contract("cpo", {"loss": "sigmoid_norm", "beta": 2.0, "gamma": 0.5, "nll_coef": 0.5})
TestTPO = algorithm_contract("tpo")
TestTPOL = algorithm_contract("tpo", {"loss": "sigmoid_norm", "beta": 2.0, "gamma": 0.5, "nll_mean": "rows"})
TestLD = algorithm_contract("dpo", {"loss": "sigmoid", "ld_alpha": 0.3})
