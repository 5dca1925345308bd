"""Quality: perplexity and divergence from the parent."""
