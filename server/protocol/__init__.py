"""Request and response bodies of the OpenAI surface, as pydantic models."""
