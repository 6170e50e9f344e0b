"""`safeops trace SCRIPT` and `safeops audit SCRIPT`: scripts, and the processes that they start."""
