"""Model families: configuration, tensors and forward pass, one file per family."""
