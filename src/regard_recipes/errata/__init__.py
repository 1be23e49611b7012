"""Errors in the papers and their programs, each shown by a function of a few lines."""
