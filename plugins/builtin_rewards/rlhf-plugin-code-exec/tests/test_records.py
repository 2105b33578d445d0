"""LeetCode's lists and trees: its header is given to the solution, and nodes are passed as values."""

import pytest

from rlhf_host import Unjudged

HEADER = """
from typing import *

class ListNode:
    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next

class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val, self.left, self.right = val, left, right

class Node:
    def __init__(self, val, children=None):
        self.val, self.children = val, children or []

def list_node(values):
    head = None
    for value in reversed(values):
        head = ListNode(value, head)
    return head

def is_same_list(p, q):
    while p and q:
        if p.val != q.val:
            return False
        p, q = p.next, q.next
    return p is None and q is None

def tree_node(values):
    nodes = [None if value is None else TreeNode(value) for value in values]
    below = iter(nodes[1:])
    for node in nodes:
        if node:
            node.left, node.right = next(below, None), next(below, None)
    return nodes[0] if nodes else None

def is_same_tree(p, q):
    if not p and not q:
        return True
    return bool(p and q) and p.val == q.val and is_same_tree(p.left, q.left) and is_same_tree(p.right, q.right)
"""
REVERSE = "class Solution:\n    def f(self, head: Optional[ListNode]):\n        last = None\n        while head:\n"
REVERSE += "            head.next, last, head = last, head, head.next\n        return last\n"
LONG = "assert is_same_list(candidate(head=list_node([*range(3000)])), list_node([*range(3000)][::-1]))"
CYCLE = "a = list_node([1, 2])\na.next.next = a\nassert candidate(a) is True\nassert candidate(list_node([1, 2])) is False"
RIGHT = {
    "a list": (REVERSE, LONG),
    "a class of its own, as in the header": (
        "class ListNode:\n    def __init__(self, x): self.val, self.next = x, None\n" + REVERSE,
        LONG,
    ),
    "annotations that wait": ("from __future__ import annotations\n" + REVERSE, LONG),
    "a cycle": (
        "class Solution:\n    def f(self, head):\n        slow = fast = head\n        while fast and fast.next:\n"
        "            slow, fast = slow.next, fast.next.next\n            if slow is fast: return True\n        return False",
        CYCLE,
    ),
    "a tree": (
        "class Solution:\n    def f(self, root: Optional[TreeNode]) -> Optional[TreeNode]:\n        if root:\n"
        "            root.left, root.right = self.f(root.right), self.f(root.left)\n        return root",
        "assert is_same_tree(candidate(root=tree_node([4, 2, 7, 1, None])), tree_node([4, 7, 2, None, None, None, 1]))\n"
        "assert candidate(None) is None",
    ),
    "a list of lists": (
        "class Solution:\n    def f(self, lists):\n        values = []\n        for p in lists:\n"
        "            while p: values.append(p.val); p = p.next\n        return list_node(sorted(values))",
        "assert is_same_list(candidate([list_node([1, 4]), list_node([2]), None]), list_node([1, 2, 4]))",
    ),
    "a result of several": (
        "class Solution:\n    def f(self, head): return [head, head.next]",
        "p, q = candidate(list_node([1, 2]))\nassert is_same_list(p, list_node([1, 2])) and is_same_list(q, list_node([2]))",
    ),
    "children": (
        "class Solution:\n    def f(self, root): return [c.val for c in root.children] + [root.val]",
        "assert candidate(Node(1, [Node(2), Node(3)])) == [2, 3, 1]",
    ),
    "in place": (
        "class Solution:\n    def f(self, head):\n        head.next = ListNode(7, head.next)",
        "head = list_node([1, 2])\ncandidate(head)\nassert is_same_list(head, list_node([1, 7, 2]))",
    ),
}
WRONG = {
    "another list": ("class Solution:\n    def f(self, head): return head", LONG),
    "functions of its own": (
        "is_same_list = is_same_tree = lambda *a: True\nlist_node = lambda x: x\nclass Solution:\n"
        "    def f(self, head): return head",
        LONG,
    ),
    "a class of its own that says yes": (
        "class ListNode:\n    val = next = property(lambda self: self, lambda self, x: None)\n    __eq__ = lambda *a: True\n"
        "class Solution:\n    def f(self, head): return ListNode()",
        LONG,
    ),
    "an object that ends when asked": (
        "class E:\n    n = 3000\n    next = property(lambda self: self)\n    val = property(lambda self: 0)\n"
        "    def __bool__(self): self.n -= 1; return self.n > 0\n"
        "class Solution:\n    def f(self, head): return E()",
        "assert is_same_tree(candidate(head=list_node([1])), tree_node([5, 6]))",
    ),
    "a node that cannot be read": (
        "import os\nclass Solution:\n    def f(self, head):\n"
        '        os.write(4, b\'{"value": {"o": [["ListNode", {"__class__": 1}]]}, "changed": null}\\n\')',
        LONG,
    ),
    "an emptied list": (
        "class Solution:\n    def f(self, head):\n        head.val, head.next = 0, None\n        return head",
        "head = list_node([1, 2])\nr = candidate(head)\nassert is_same_list(r, head)",
    ),
    "nothing": ("", LONG),
}


def row(tests, **columns):
    checks = "\n".join(f"    {line}" for line in tests.splitlines())
    return {"test": f"def check(candidate):\n{checks}\n", "entry_point": "Solution().f", **columns}


@pytest.mark.parametrize(("solution", "tests"), RIGHT.values(), ids=RIGHT)
def test_right_solutions_are_right(judge, solution, tests):
    assert judge(solution, **row(tests, prompt_code=HEADER)).value == 1.0


@pytest.mark.parametrize(("solution", "tests"), WRONG.values(), ids=WRONG)
def test_wrong_ones_are_wrong(judge, solution, tests):
    assert judge(solution, **row(tests, prompt_code=HEADER)).value == 0.0


@pytest.mark.parametrize("solution", [REVERSE, "", "is_same_list = list_node = lambda *a: True\n" + REVERSE])
def test_without_the_header_a_task_is_not_judged(judge, solution):
    told = judge(solution, **row(LONG))
    assert isinstance(told, Unjudged)
    assert "its tests use is_same_list, list_node of LeetCode's header" in told.reason
