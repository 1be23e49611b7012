"""Recipes on Memory Mosaics."""
