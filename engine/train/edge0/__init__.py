"""Training of prerouter heads and of the recovery LoRA, for any model that the engine streams."""
