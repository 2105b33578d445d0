"""The reward ``math_verifier``: compares the answer in a model's text with the label."""

from rlhf_plugin_math_verifier.verifier import MathVerifier

__all__ = ["MathVerifier"]
