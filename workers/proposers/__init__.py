"""Who drafts: one file a proposer."""
