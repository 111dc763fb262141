"""From a model's name, folder or file to a decoder and a tokenizer."""
