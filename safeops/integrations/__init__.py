"""Replacements for functions of other libraries, with their names and arguments. It imports none of these libraries."""
