"""Integrations with other packages. Each module imports the package it is named after; this one imports none."""
