"""Text, tokenizers, and the windows of text that a model is trained on."""
