"""Tools of developers: compile kernels for a GPU that is not present."""
