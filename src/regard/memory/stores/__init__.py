"""Where a memory keeps its slot values, and how it reads and sums them."""
