"""A 2- or 3-bit matrix is the packed 4-bit one with the empty bits of its nibbles squeezed out, so every packing folds alike.

Codes below 4 use bits 0 and 1 of a nibble: two halves of the bytes share one byte. Codes below 8 also use bit 2: four
quarters of that bit share one byte behind them. Unfolding takes a few operations on whole bytes, and what comes out is what
the 4-bit product reads; a matrix must have a multiple of 8 weights.
"""

from __future__ import annotations

import torch

_LOW, _ONE = 0x33, 0x11  # in both nibbles of a byte: bits 0 and 1; bit 0


def fold(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """packed [B] uint8, nibbles below 2^bits -> [B * bits / 4] uint8."""
    if bits == 4:
        return packed
    first, second = (packed & _LOW).chunk(2)
    folded = first | (second << 2)
    if bits == 2:
        return folded
    top = [part << i for i, part in enumerate(((packed >> 2) & _ONE).chunk(4))]
    return torch.cat((folded, top[0] | top[1] | top[2] | top[3]))


def unfold(folded: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of `fold`; at 4 bits the very tensor."""
    if bits == 4:
        return folded
    half = folded.numel() // bits * 2  # bytes of the part that holds bits 0 and 1
    packed = folded.new_empty(2 * half)
    torch.bitwise_and(folded[:half], _LOW, out=packed[:half])
    torch.bitwise_right_shift(folded[:half], 2, out=packed[half:]).bitwise_and_(_LOW)
    if bits == 3:
        for i, part in enumerate(packed.chunk(4)):
            part |= ((folded[half:] >> i) & _ONE) << 2
    return packed
