"""Between token ids and what people read: templates, detokenizer, stop strings, parsers."""
