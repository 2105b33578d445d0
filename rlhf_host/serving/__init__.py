"""An OpenAI-compatible server over the conversation trees of episodes. It needs aiohttp: the extra ``rlhf-host[serve]``."""
