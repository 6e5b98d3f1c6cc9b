"""The filesystem tier keeps its promises on URLs too: whole objects, plain files, real S3."""

import pytest

pytest.register_assert_rewrite("kvtiers.tiers.conformance")

# Rewritten before its import.
from remote_recipes import MemoryRecipe, PlainRecipe, S3Recipe  # noqa: E402


class TestMemory(MemoryRecipe):
    pass


class TestPlainFiles(PlainRecipe):
    pass


class TestS3(S3Recipe):
    pass
