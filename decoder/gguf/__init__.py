"""GGUF files as checkpoints: their header, what it says in Hugging Face's words, and their tensors as numbers."""
