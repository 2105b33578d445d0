"""The host's contract, check by check, for the verifier."""

from rlhf_authoring import reward_contract

from rlhf_host import Task

TASKS = [Task("2+2=", "4"), Task("Differentiate.", "x^2+1", index=1), Task("Capital of France?", "Paris", index=2)]
TEXTS = ["4", "The answer is 4.", r"so \boxed{x^2+1}", "#### Paris", "", "I do not know"]

TestMathVerifier = reward_contract("math_verifier", {"timeout_s": 0.5, "workers": 1}, tasks=TASKS, texts=TEXTS)
