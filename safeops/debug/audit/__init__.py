"""Audit: the unsafe patterns of a step, as they happen."""
