"""For plugin authors' tests: made-up batches and tiny models."""
