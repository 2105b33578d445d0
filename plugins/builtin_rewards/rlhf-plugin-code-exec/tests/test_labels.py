"""Tasks without tests are found before anything is sampled."""

from rlhf_plugin_code_exec import CodeExec

from rlhf_host import Task


def test_tasks_without_tests_are_named():
    tasks = [Task("p", "assert f() == 1"), Task("p"), Task("p", None, {"tests": ["assert f() == 1"]}), Task("p", "f(")]
    found = CodeExec(CodeExec.Options()).check_labels(tasks)
    assert found.keys() == {1, 3}
    assert "it has no tests" in found[1]
    assert "its tests are no Python" in found[3]
