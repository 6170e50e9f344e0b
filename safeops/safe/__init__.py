"""Safe mode: in an unmodified script, torch functions call their safeops twins (docs/safe-mode.md)."""
