"""Pure functions on tensors: polarity attention, its reference and its variants, the gated convolution, windows, entropy."""
