"""Safe mode: torch's functions call their twins in a script that nobody edits (docs/safe-mode.md)."""
