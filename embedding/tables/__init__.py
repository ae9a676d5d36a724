"""Tables open in this process: which rows they open with, their folder, their group."""
