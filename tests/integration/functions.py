"""What `python` nodes of the session's server may call."""

from workflows.functions import function


@function(pure=True)
def backwards(text: str) -> str:
    return text[::-1]
