"""Contract suites: named checks of what the host relies on, for any installed plugin.

In a plugin's tests, one line::

    TestContract = algorithm_contract("rloo")

Without pytest, ``run_contract("algo", "rloo")`` gives the same checks' results.
"""
