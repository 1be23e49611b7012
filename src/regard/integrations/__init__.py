"""Bridges to other packages; each module imports the one it is named after, so that this package imports none."""
