"""locate_errors: raise a kernel's error at the op that caused it."""
