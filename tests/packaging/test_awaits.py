"""A sum that several tasks add to is read after the wait, not before it: what others added meanwhile would be lost."""

import ast

from .sources import ROOT, python_files


def lost(source):
    """Returns the lines that add to an attribute or an element what comes of an ``await``."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.AugAssign)
        and isinstance(node.target, ast.Attribute | ast.Subscript)
        and any(isinstance(part, ast.Await) for part in ast.walk(node.value))
    ]


def test_no_sum_is_read_before_a_wait():
    files = [(file, text) for file in python_files() if "await" in (text := file.read_text())]
    found = [f"{file.relative_to(ROOT)}:{line}" for file, text in files for line in lost(text)]
    assert not found, "give what is awaited a name, and add it in the next line"


def test_what_is_told():
    told = "async def f(self, own):\n    self.sum += await g()\n    own[0] += [await g()]\n    own += await g()\n"
    assert lost(told) == [2, 3]
