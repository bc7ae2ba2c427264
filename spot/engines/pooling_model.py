"""A sentence-transformers model, taken apart into the two steps of a batching host."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Transformer

from spot.engines.codec import PoolingCard

Text = str | tuple[str, str]
_ANY_LENGTH = 10**6
_NOT_PER_INPUT = ("modality", "prompt_length", "logits_to_keep")


class UnsuitableModel(Exception):
    """This model cannot do what is asked of it."""


@dataclass(slots=True)
class Sample:
    """One tokenized input. common: what the model wants to know of the kind of input."""

    fields: dict[str, list[int]]
    common: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        return len(self.fields["input_ids"])


class PoolingModel:
    """An embedding model (`task` embed) or a cross-encoder (`task` score).

    model: a folder, or a name on the hub. device, dtype: "auto" for the accelerator if there is
        one, and for the checkpoint's own type there, float32 on a CPU.
    Raises UnsuitableModel, and whatever sentence-transformers raises.
    """

    def __init__(
        self,
        model: str,
        *,
        task: Literal["embed", "score"],
        device: str = "auto",
        dtype: str = "auto",
        max_model_len: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        kind: Any = SentenceTransformer if task == "embed" else CrossEncoder
        device = _device(device)
        if dtype == "auto" and device == "cpu":
            dtype = "float32"
        self._model = kind(
            model,
            device=device,
            local_files_only=os.path.isdir(model),
            trust_remote_code=trust_remote_code,
            model_kwargs={"dtype": dtype},
        ).eval()
        self._device = self._model.device
        if not isinstance(self._model[0], Transformer) or self._model.tokenizer is None:
            raise UnsuitableModel(
                f"only models with a transformer and a tokenizer are served, not "
                f"{type(self._model[0]).__name__}"
            )
        self._tokenizer = getattr(self._model.tokenizer, "tokenizer", self._model.tokenizer)
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._prompt = (self._model.prompts or {}).get(self._model.default_prompt_name)
        self.card = self._card(task, max_model_len)

    def tokenize(self, texts: list[Text], *, truncate_to: int | None = None) -> list[Sample]:
        """Texts, or pairs of them, to tokens."""
        options: dict[str, Any] = {"padding": False, "truncation": False}
        if truncate_to is not None:
            options |= {"truncation": "longest_first", "max_length": truncate_to}
        prepared = self._model.preprocess(
            texts,
            prompt=self._prompt,
            processing_kwargs={"text": options, "common": {"return_tensors": None}},
        )
        common = {name: prepared[name] for name in _NOT_PER_INPUT if name in prepared}
        columns = {
            name: values
            for name, values in prepared.items()
            if name in self._tokenizer.model_input_names
        }
        return [
            Sample({name: values[row] for name, values in columns.items()}, common)
            for row in range(len(texts))
        ]

    def sample_of_ids(self, token_ids: list[int], *, truncate_to: int | None = None) -> Sample:
        """Token ids as they are, without the tokenizer's special tokens."""
        ids = token_ids if truncate_to is None else token_ids[:truncate_to]
        fields = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        if "token_type_ids" in self._tokenizer.model_input_names:
            fields["token_type_ids"] = [0] * len(ids)
        modality = "message" if "message" in self._model[0].modality_config else "text"
        return Sample(fields, {"modality": modality})

    def pool(self, samples: list[Sample]) -> NDArray[np.float32]:
        """One row for each sample."""
        padded = self._tokenizer.pad([sample.fields for sample in samples], return_tensors="pt")
        features = {name: tensor.to(self._device) for name, tensor in padded.items()}
        with torch.inference_mode():
            output = self._model(features | samples[0].common)
            if self.card.task == "embed":
                rows = output["sentence_embedding"]
            else:
                rows = self._model.activation_fn(output["scores"].float())
        rows = rows.reshape(len(samples), self.card.dimension)
        return np.asarray(rows.float().cpu().numpy(), dtype="<f4")

    def _card(self, task: Literal["embed", "score"], max_model_len: int | None) -> PoolingCard:
        config = self._model.config
        if task == "score" and self._model.num_labels != 1:
            raise UnsuitableModel(
                f"a model for reranking gives one score; this one gives {self._model.num_labels}"
            )
        listed = getattr(config, "matryoshka_dimensions", None) or []
        dimension = self._model.get_embedding_dimension() if task == "embed" else 1
        return PoolingCard(
            task=task,
            dimension=dimension,
            max_model_len=self._context_length(max_model_len),
            vocab_size=self._model.transformers_model.get_input_embeddings().num_embeddings,
            device=str(self._device),
            dtype=str(self._model.dtype).removeprefix("torch."),
            matryoshka=bool(listed) or bool(getattr(config, "is_matryoshka", False)),
            matryoshka_dimensions=[int(value) for value in listed],
        )

    def _context_length(self, asked: int | None) -> int:
        """Tokens in one input: what the model was made for, or less if less is asked."""
        config = self._model.config
        limits = [self._model.max_seq_length, getattr(config, "max_position_embeddings", None)]
        known = [int(limit) for limit in limits if limit is not None and limit < _ANY_LENGTH]
        if asked is not None and known and asked > max(known):
            raise UnsuitableModel(f"the model's context is {max(known)} tokens, not {asked}")
        if asked is not None:
            return asked
        if not known:
            raise UnsuitableModel("the model does not say how long its context is; set the limit")
        return min(known)


def _device(asked: str) -> str:
    if asked != "auto":
        return asked
    return "cuda" if torch.cuda.is_available() else "cpu"
