"""Text, tokenizers, and the windows of text for training and evaluation."""
