"""DFlash, DFlash 2 and DSpark: heads that draft a block of mask tokens in one pass."""
