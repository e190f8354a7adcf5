"""The tail of the attention layer: depthwise convolution of the values, and the gate."""
