"""Other packages' functions under their own names and arguments, computed by regard: `entmax` and `fla`."""
