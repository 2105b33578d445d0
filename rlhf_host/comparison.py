"""Names for packages that compare what they compute with the plain path, as kernels do: made-up rows, a model's hidden states for
them, what is wrong with a decoder, and how far results may lie apart. Importing this loads torch.
"""

from rlhf_host.engines.plain_path import decoder_problem
from rlhf_host.errors import beyond
from rlhf_host.models.layout_check import EXACT, ROUGH, WIDE, example_layouts, hidden_states, random_text, structure
from rlhf_host.models.precision import without_tf32

__all__ = [
    "EXACT",
    "ROUGH",
    "WIDE",
    "beyond",
    "decoder_problem",
    "example_layouts",
    "hidden_states",
    "random_text",
    "structure",
    "without_tf32",
]
