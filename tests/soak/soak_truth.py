"""Makes a soak's model, and answers its prompts with an engine that has no connector."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "e2e"), str(Path(__file__).parents[1] / "support")]

# Found since the line above.
from engine import Engine  # noqa: E402
from models import make_llama  # noqa: E402
from soak_load import TOKENS  # noqa: E402


def main() -> None:
    """Arguments: a folder for the model, a file with prompts, a file for the answers."""
    model, asked, answered = map(Path, sys.argv[1:])
    make_llama(model)
    with Engine(model, max_model_len=2048) as engine:
        prompts = json.loads(asked.read_text())
        batches = (prompts[start : start + 8] for start in range(0, len(prompts), 8))
        answers = [answer for batch in batches for answer in engine.ask_all(batch, TOKENS)]
    words = [[f"w{token}" for token in answer.tokens] for answer in answers]
    answered.write_text(json.dumps(words))


if __name__ == "__main__":
    main()
