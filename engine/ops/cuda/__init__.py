"""The operations of `_core` for tables on an NVIDIA GPU. They compile the same kernel bodies as the CPU."""
