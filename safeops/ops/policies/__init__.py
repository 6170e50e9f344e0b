"""Losses of policies, their advantages, and divergences from a reference: reinforcement learning of language models."""
