"""What ``rlhf doctor`` looks at: one module per section."""
