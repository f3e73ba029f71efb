"""The loop of a generator: requests, batch, stopping, rounds. Sees `paceline.core`, text and outputs only."""
