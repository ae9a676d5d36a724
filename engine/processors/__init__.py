"""What a table asks of a processor, the processors, and the choice of one by device."""
