"""Replacements for functions of other libraries, with their names and arguments, and callbacks for them. A library is
imported with its callback alone."""
