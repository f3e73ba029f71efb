"""Names of variables."""

HOST_WORLD_SIZE = "HOST_WORLD_SIZE"
