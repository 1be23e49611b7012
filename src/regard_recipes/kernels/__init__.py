"""Recipes on kernels and associative memories."""
