"""Between text and tokens: what comes in at the front door and what goes out."""
