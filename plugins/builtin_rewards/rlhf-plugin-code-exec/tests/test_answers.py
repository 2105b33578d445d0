"""The code of an answer."""

import pytest
from rlhf_plugin_code_exec.answers import code_of, solution_of


def test_answers_that_continue_a_prompt_or_repeat_it():
    before = "import math\n\ndef helper(x): return x\n\ndef area(r):\n    '''Area.'''\n"
    body = "    return math.pi * r * r\n"
    assert solution_of(body, before) == before + body
    whole = "def area(r):\n    return math.pi * r * r\n"
    assert solution_of(f"```python\n{whole}```", before) == "import math\n\ndef helper(x): return x\n\n\n" + whole
    nested = "    def area(r): return r\n    return area(r)\n"
    assert solution_of(f"```python\n{nested}```", before) == before + nested, "a body may define a helper of the same name"
    indented = "  def area(r):\n      return math.pi * r * r\n"
    assert solution_of(f"```python\n{indented}```", before) == solution_of(whole, before)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("```\nx\n```", "x\n"),
        ("```python\nunfinished", "unfinished"),
        ("x = 1", "x = 1"),
        ("```python3\nx\n```", "x\n"),
        ("```Python \nx\n```", "x\n"),
        ('```py title="a.py"\nx\n```', "x\n"),
        ("~~~python\nx\n~~~", "x\n"),
        ("```python\r\nx\r\ny\r\n```\r\n", "x\ny\n"),
        ("- so:\n  ```python\n  if x:\n      y\n  ```\n", "if x:\n    y\n"),
        ("1. ```python\n   if x:\n       y\n   ```\n", "if x:\n    y\n"),
        ("So: ```python\nif x:\n    y\n```", "if x:\n    y\n"),
        ("```python\nx\n```\nOutput:\n```\n1\n```", "x\n"),
        ("```python\nx\n```\n```text\n1\n```\n", "x\n"),
        ("```\nx\n```\n```json\n{}\n```\n", "x\n"),
        ("```\na\n```\n```\nb\n```\n", "b\n"),
        ("Put it in ``` fences:\n```python\nx\n```", "x\n"),
    ],
)
def test_the_code_of_an_answer(answer, code):
    assert code_of(answer).rstrip() == code.rstrip()


@pytest.mark.parametrize("answer", ["`" * 20_000, "~" * 20_000 + "!", "```" + " " * 20_000 + "!", "```" + "a" * 20_000 + "!"])
@pytest.mark.timeout(2)
def test_an_answer_of_fences_alone_takes_no_time(answer):
    assert code_of(answer) == answer
