"""Drafters in separate processes: messages, channel, server, reconnection."""
