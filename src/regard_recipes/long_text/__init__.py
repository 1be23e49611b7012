"""Recipes on long texts: needles, streaming perplexity."""
