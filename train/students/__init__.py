"""Students: a draft model, or a head on the target's hidden states."""
