"""Whole workflows: Shuntyard's beside LangGraph's, LlamaIndex's and Haystack's, on one server."""
