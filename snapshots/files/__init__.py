"""The format of snapshots, and the code that writes, reads and checks one snapshot."""
