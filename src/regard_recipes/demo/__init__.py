"""The experiment behind `regard demo`."""
