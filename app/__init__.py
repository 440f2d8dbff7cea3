"""The browser app: it shows and asks, and everything it knows of models comes through the engine's façade."""
