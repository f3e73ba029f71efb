"""Drafters in other processes: messages, channel, server, reconnection."""
