"""A small tokenizer with a chat template, and a tiny Llama over it: for tests that render conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from support.tiny_policy import save_tiny_llama

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CORPUS = (
    "system user assistant tool\nWhat is two plus two? add them four five left says right notes plan reasoner actor"
)


def save_chat_tokenizer(folder: Path, template: str | None = CHATML, stop: str | None = "<|im_end|>") -> Path:
    """Bytes and a few merges; <|im_start|> and <|im_end|> are control tokens, and `stop` ends an answer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [CORPUS] * 4,
        trainers.BpeTrainer(
            vocab_size=340,
            special_tokens=["<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(  # which templates go around, as they say all themselves
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)]
    )
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=stop)  # type: ignore[no-untyped-call]
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def save_chat_model(folder: Path) -> Path:
    """The tokenizer, and random weights that know its ids."""
    save_tiny_llama(folder, vocabulary=340)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    return save_chat_tokenizer(folder)
