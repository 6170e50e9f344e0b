"""`safeops trace SCRIPT` and `safeops audit SCRIPT`: run a script and watch the processes that it starts."""
