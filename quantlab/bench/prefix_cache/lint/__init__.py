"""Finds what varies too early in logs of requests: log.py reads, causes.py names, fixes.py repairs, run.py counts."""
