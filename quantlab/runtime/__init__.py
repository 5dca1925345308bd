"""Backends: a loaded model that takes one step at a time."""
