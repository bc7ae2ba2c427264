"""Imports vLLM once, with its own warnings ignored; without vLLM there is nothing to test here."""

from __future__ import annotations

import importlib.util
import warnings

collect_ignore_glob: list[str] = []

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from spot.engines.vllm_compat.environment import apply_default_environment

    apply_default_environment()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.engine.arg_utils
        import vllm.entrypoints.openai.chat_completion.protocol
        import vllm.parser
        import vllm.v1.engine.core_client
        import vllm.v1.engine.input_processor  # noqa: F401
