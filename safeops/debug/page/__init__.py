"""The history of a traced run: by module and step, as a page and for TensorBoard."""
