"""The endpoints, one module each: a body in, an OpenAI answer out."""
