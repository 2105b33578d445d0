"""Models: loading, heads, and token log-probabilities without the full logits."""
