"""Trace: the op, module and line that made the first NaN or inf of a training step."""
