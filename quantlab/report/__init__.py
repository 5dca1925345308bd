"""Results -> comparison, tables, verdicts."""
