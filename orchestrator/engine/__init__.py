"""The loop of a generator: requests, batch, stopping, rounds. Sees `paceline.core` only."""
