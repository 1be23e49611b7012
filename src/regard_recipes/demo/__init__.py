"""`regard demo`."""
