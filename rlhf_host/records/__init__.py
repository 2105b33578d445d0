"""The nouns: what hooks receive and return."""
