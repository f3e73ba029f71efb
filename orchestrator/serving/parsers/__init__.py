"""What a model says beside plain text, found in its text: reasoning and tool calls. Values only."""
