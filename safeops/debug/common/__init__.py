"""The tools share this: the running line, facts of ATen ops, counts of a tensor's values, memory, modules, advice."""
