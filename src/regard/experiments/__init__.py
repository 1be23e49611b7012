"""Recipes: each module trains, measures, and writes a table, figures and JSON. `recipes.py` has their registry."""
