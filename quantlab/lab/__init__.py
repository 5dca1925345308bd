"""Executes a Step and keeps its Result: recipes, resume, the results store, provenance."""
