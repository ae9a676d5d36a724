"""TorchRec's entry points for many processes: the model over ranks, and its training loops."""
