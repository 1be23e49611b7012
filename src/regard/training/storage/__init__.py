"""Files of a training run: folders, locks, checkpoints, saved models and tokenizers."""
