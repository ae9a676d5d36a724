"""The crash harness: trainers killed at random instants and inside calls to the disk, and what is found after."""
