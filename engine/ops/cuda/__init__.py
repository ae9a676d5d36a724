"""Tables on an NVIDIA GPU: the operations of `_core` on tensors of a CUDA device, by the same kernel bodies."""
