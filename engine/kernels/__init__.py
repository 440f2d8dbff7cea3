"""Arithmetic of one expert: formats of a weight matrix, their matmuls, and the expert MLP built from them."""
