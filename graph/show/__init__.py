"""Show a step to people: listing, drawing, profile, and why it was compiled."""
