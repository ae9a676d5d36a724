"""What a table asks of a processor, and the processors."""
