"""The operations of `_core` for tables on an NVIDIA GPU, compiled from the same kernel bodies as for the CPU."""
