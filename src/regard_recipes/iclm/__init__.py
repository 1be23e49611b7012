"""Recipes on ICLM."""
