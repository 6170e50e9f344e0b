"""Parts shared by the tools: the running line, facts of ATen ops, counts of values, memory, modules, advice."""
