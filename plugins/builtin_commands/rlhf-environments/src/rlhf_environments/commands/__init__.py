"""Commands ``rlhf env``."""
