"""Text processing: requests to token ids, and output tokens to text."""
