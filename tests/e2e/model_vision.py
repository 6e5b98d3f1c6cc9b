"""A small model that sees images, whose processor works with Pillow alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models

IMAGE = models.VOCABULARY - 1
"""Token id that stands for an image in a prompt."""
_SIDE, _PATCH, _SCALE = 56, 14, 2
_TOKENS = (_SIDE // _PATCH // _SCALE) ** 2


def make_idefics3(folder: Path) -> Path:
    """Idefics 3's kind, as SmolVLM: a vision tower of two layers before a Llama of two."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, LlamaConfig

    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": _SIDE, "patch_size": _PATCH}
    text = LlamaConfig(num_hidden_layers=2, pad_token_id=1, **models.SIZES)
    config = Idefics3Config(
        vision_config=vision,
        text_config=text.to_dict(),
        image_token_id=IMAGE,
        pad_token_id=1,
        scale_factor=_SCALE,
        tie_word_embeddings=False,
    )
    models.save(Idefics3ForConditionalGeneration(config), folder)
    _save_processor(folder)
    return folder


def make_image(seed: int) -> Any:
    """A Pillow image of noise."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (_SIDE, _SIDE, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _save_processor(folder: Path) -> None:
    from transformers import Idefics3ImageProcessorPil, Idefics3Processor

    size = {"longest_edge": _SIDE}
    images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    Idefics3Processor(images, _tokenizer(), image_seq_len=_TOKENS).save_pretrained(folder)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    special = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    words = {f"w{index}": index for index in range(models.VOCABULARY - len(special))}
    words |= {name: IMAGE - index for index, name in enumerate(special)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="w0",
        pad_token="w1",
        additional_special_tokens=special,
    )
