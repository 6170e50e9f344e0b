"""The elementwise functions: of one operand, of two, and those that a mask steers."""
