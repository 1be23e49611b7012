"""impl="blocked": attention in linear memory on any device, block of queries by block of queries."""
