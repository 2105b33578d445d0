"""Engines, which generate tokens: the protocol, and the embedded engine on transformers."""
