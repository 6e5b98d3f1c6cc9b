"""A model's queries and keys, layer by layer, without an engine.

For ``kvtiers heat`` and for the figure that says what heat is worth: both measure with
the functions that the live probe measures with.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtiers.tools.model import ModelError

if TYPE_CHECKING:
    import torch

Observe = Callable[[int, "torch.Tensor", "torch.Tensor", float], None]
"""``(layer, query, keys, scale)``: ``query`` is ``[tokens, query_heads, head_size]``, ``keys``
``[kv_heads, head_size, tokens]``, both with their positions in them."""

_NAME = "kvtiers_heat"


class HeatModel:
    """A language model in float32 on the CPU, with its tokenizer.

    Args:
        path: folder of the model, as transformers reads it.

    Raises:
        ModelError: it can't be loaded.

    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():  # transformers would look for the name on a model hub
            raise ModelError(f"{path} holds no model that can be loaded: there is no such folder.")
        try:
            import torch
            from transformers import AutoModelForCausalLM, AutoTokenizer
            from transformers.utils.logging import disable_progress_bar
        except ImportError as error:
            raise ModelError(
                f"Attention is measured with torch and transformers ({error}). Install them, or "
                "vLLM, which has both."
            ) from error
        disable_progress_bar()  # its bars would cross the caller's own output
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path)
            self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} holds no model that can be loaded: {error}") from error

    def tokens(self, text: str) -> list[int]:
        """The token ids of a text."""
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def text(self, tokens: list[int]) -> str:
        """The text of token ids."""
        text: str = self._tokenizer.decode(tokens)
        return text

    def run(self, tokens: list[int], observe: Observe) -> None:
        """Run one prompt, and show each layer's queries and keys once they are computed."""
        import torch
        from transformers import AttentionInterface

        def attention(
            module: Any, query: Any, key: Any, value: Any, *_: Any, scaling: float, **__: Any
        ) -> tuple[Any, None]:
            observe(module.layer_idx, query[0].transpose(0, 1), key[0].transpose(1, 2), scaling)
            output = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, scale=scaling, is_causal=True, enable_gqa=True
            )
            return output.transpose(1, 2).contiguous(), None

        AttentionInterface.register(_NAME, attention)
        self._model.set_attn_implementation(_NAME)
        with torch.inference_mode():
            # Without the last layer's logits, which nobody needs.
            self._model.base_model(input_ids=torch.tensor([tokens]), use_cache=False)
