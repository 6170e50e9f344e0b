"""The history of a traced run by module and step: kept, written as a page, and logged to TensorBoard."""
