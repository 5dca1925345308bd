"""The nouns: model, artifact, result, statistics, hardware, units, errors. No torch, no rich."""
