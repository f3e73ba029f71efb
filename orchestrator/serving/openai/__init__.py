"""Requests and answers in OpenAI's formats. Values only: no HTTP, no model."""
