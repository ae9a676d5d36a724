"""Show a step to people: as a listing, a drawing or a profile, with the reason why the step was compiled."""
