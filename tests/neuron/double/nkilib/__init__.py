"""As the NKI Library's package of the same name."""
