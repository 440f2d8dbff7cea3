"""Decode loops are generators of tokens: prefill and reuse, sampling, text streaming and stop handling."""
