"""Labels that cannot be judged against are found before anything is sampled."""

from rlhf_plugin_math_verifier import MathVerifier

from rlhf_host import Task


def test_tasks_without_a_usable_label_are_named():
    labels = ["72", None, 7, r"\boxed{x^2}", {"answer": 7}, "", float("nan"), "N/A", "???", "$$", r"\boxed{}", "TBD"]
    found = MathVerifier(MathVerifier.Options()).check_labels([Task("p", label) for label in labels])
    assert found.keys() == {1, 4, 5, 6, 7, 8, 9, 10, 11}
    assert found[1] == "the task has no label"
    assert found[7] == "the label 'N/A' is no answer"
    assert found[4] == "the label is not a text or a number but dict"
