"""Parsers of a model's text into plain text, reasoning and tool calls. Values only."""
