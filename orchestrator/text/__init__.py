"""Text at the edge: tokenizers, detokenising, stop strings, streamers, logits processors."""
