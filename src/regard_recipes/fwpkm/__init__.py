"""Recipes on fast-weight product-key memories."""
