"""TorchRec's `DistributedModelParallel` and train pipelines."""
