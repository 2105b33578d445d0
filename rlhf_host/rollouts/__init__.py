"""Rollouts: episodes, scoring, filtering, and the batch of groups as tensors."""
