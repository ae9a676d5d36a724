"""What a table is, in a user's words: options, initializers, names, and the checks of what users give."""
