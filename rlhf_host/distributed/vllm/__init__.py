"""vLLM: an engine with weights of its own."""
