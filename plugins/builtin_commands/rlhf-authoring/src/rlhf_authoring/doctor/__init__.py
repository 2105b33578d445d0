"""Things that ``rlhf doctor`` looks at: one module per section."""
