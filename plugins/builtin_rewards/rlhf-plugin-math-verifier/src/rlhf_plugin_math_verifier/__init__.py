"""The reward ``math_verifier``: compares the answer in a model's text with the label."""

from typing import TYPE_CHECKING

from rlhf_host.internals import lazily

if TYPE_CHECKING:
    from rlhf_plugin_math_verifier.verifier import MathVerifier as MathVerifier

__getattr__, __dir__, __all__ = lazily(__name__)  # its worker processes do without it, and start sooner
