"""Training together: the part that a user's own loop touches."""
