"""Which experts come next and when: forecasters read the model and ask a tier for the future."""
