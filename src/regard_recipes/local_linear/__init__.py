"""Recipes on local linear attention."""
