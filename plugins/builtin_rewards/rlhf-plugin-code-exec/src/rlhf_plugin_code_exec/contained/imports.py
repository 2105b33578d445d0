"""Modules that tests import: ``pytest`` is a small one of ours. The solution is the module ``solution``, or the one that does
not exist if tests reach the solution in no other way.
"""

import importlib.machinery
import importlib.util
import sys

from .remote import end


class Solution(type(sys)):  # type: ignore[misc]
    """The solution as a module."""

    def __getattr__(self, name):
        if name == "__all__":
            return self.__dict__["_names"]
        if name.startswith("__"):
            raise AttributeError(name)
        self.__dict__[name] = value = self.__dict__["_get"](name)
        return value


class Finder:
    """Finds the solution under names of modules."""

    def __init__(self, roots, names, get):
        self.roots, self.names, self.get = roots, names, get

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.roots:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec):
        module = Solution(spec.name)
        module.__dict__.update(_names=self.names, _get=self.get)
        return module

    def exec_module(self, module):
        pass


def install(modules, names, get):
    """Installs the finder.

    Args:
        modules: modules that tests import and that do not come with Python.
        names: names of the solution that tests use without importing them by name. ``import *`` gives only these, because a
            solution could have its own ``sorted`` or ``isclose``.
        get: returns an object of the solution by name.
    """
    if "pytest" in modules:
        from . import pytest_tests

        sys.modules["pytest"] = pytest_tests
    absent = [name for name in modules if name not in ("pytest", "solution") and importlib.util.find_spec(name) is None]
    roots = [name for name in modules if name == "solution"]
    if not roots and not names and len(absent) == 1:
        roots = [absent.pop()]
    if absent:
        end(unusable=f"its tests import {', '.join(absent)}, which {sys.executable} does not have (option python)")
    sys.meta_path.insert(0, Finder(roots, names, get))  # type: ignore[arg-type]
