"""Recipes: the experiments of `regard reproduce`, and `regard demo`. `regard` imports nothing from here."""
