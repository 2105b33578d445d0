"""Environments of verifiers, which run in a Python environment of their own."""

from rlhf_plugin_verifiers.agent import Verifiers
from rlhf_plugin_verifiers.rows import VerifiersTasks

__all__ = ["Verifiers", "VerifiersTasks"]
