"""Training: batching, exact loss reduction, the online loop, evaluation, checkpoints."""
