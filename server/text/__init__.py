"""Between token ids and what people read: tokenizer, templates, detokenizer, stop strings, parsers."""
