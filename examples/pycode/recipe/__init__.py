"""Scripts that make a small target/draft pair of Python-code language models."""
