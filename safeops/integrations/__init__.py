"""Functions in the place of other libraries' own, with their names and calls. None of those libraries is imported."""
