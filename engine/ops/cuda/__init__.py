"""`_core`'s operations for tables on an NVIDIA GPU, compiled from the same kernel bodies as the CPU's."""
