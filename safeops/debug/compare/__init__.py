"""Two runs side by side: the first module whose output or gradient differs by more than rounding explains."""
