"""Profiles of chosen steps: torch's profiler in every process of a run, and a timeline over all of them.

``--with profile`` chooses ``rlhf_profile.plugin.Profile``. Importing this loads no torch.
"""
