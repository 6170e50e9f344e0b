"""Locate: an error of a kernel appears at the op that caused it."""
