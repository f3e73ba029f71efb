"""As the SDK's package of the same name."""
