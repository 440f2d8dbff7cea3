"""transformers owns the model, the engine owns the experts: the skeleton, the drop-in, the router seam."""
