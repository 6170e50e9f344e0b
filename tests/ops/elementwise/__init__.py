"""The elementwise functions: of one operand, of two, and the masked ones."""
