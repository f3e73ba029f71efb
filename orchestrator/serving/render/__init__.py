"""Answers, from tokens to finished bytes. No model, no HTTP, no Ray."""
