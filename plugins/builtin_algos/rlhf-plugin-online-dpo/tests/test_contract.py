"""The host's contract, check by check, for online DPO, XPO, Nash-MD, SPIN and A*-PO, and their agents."""

from rlhf_authoring import agent_contract, algorithm_contract

TestOnlineDPO = algorithm_contract("online_dpo")
TestNLL = algorithm_contract("online_dpo", {"loss": "sigmoid", "nll_coef": 0.5, "label_smoothing": 0.1})
TestReferenceFree = algorithm_contract("online_dpo", {"loss": "sigmoid_norm", "reference_free": True, "gamma": 0.5})

TestXPO = algorithm_contract("xpo", {"alpha": 0.01, "nll_coef": 0.1})
TestNashMD = algorithm_contract("nash_md")
TestTokens = algorithm_contract("nash_md", {"kl": "token", "preference": "order"})
TestBesideReference = agent_contract("xpo")
TestBesideMixture = agent_contract("nash_md", {"mixture": 0.125})
TestSPIN = algorithm_contract("spin", {"nll_coef": 0.1})
TestHinge = algorithm_contract("spin", {"loss": "hinge"})
TestA2PO = algorithm_contract("a2po", {"beta": 0.1})
TestAnswersOfData = agent_contract("spin")
TestFirstOfPolicy = agent_contract("a2po")

# Half of its answers are the data's, which nobody sampled: they are no actions of an episode until the algorithm makes its rows.
del TestAnswersOfData.test_episodes_give_trajectories
