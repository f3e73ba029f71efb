"""GGUF files as checkpoints: header, configuration under Hugging Face's names, and tensors as numbers."""
