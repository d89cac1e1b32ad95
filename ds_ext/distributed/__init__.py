"""Who holds which elements of a parameter, and who adds up what? Knows ranks, no rule."""
