"""What the way between processes takes of what the scheduler and the workers tell each other.

vLLM pickles it with all else of a step. So it is pickled here first, by the clock, and what
vLLM has left to copy is bytes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from time import perf_counter
from typing import Any


@dataclass(frozen=True, slots=True)
class Posted:
    """A message that knows what its way took, if it went between processes.

    Attributes:
        post_s: seconds of both sides so far.

    """

    post_s: float = field(default=0.0, compare=False, kw_only=True)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickled into bytes, with what that took."""
        begin = perf_counter()
        names = [each.name for each in fields(self) if each.name != "post_s"]
        content = pickle.dumps({name: getattr(self, name) for name in names})
        return _opened, (type(self), content, self.post_s + perf_counter() - begin)


def _opened(kind: type[Posted], content: bytes, post_s: float) -> Posted:
    begin = perf_counter()
    found: dict[str, Any] = pickle.loads(content)  # noqa: S301 - it came in vLLM's own
    return kind(**found, post_s=post_s + perf_counter() - begin)
