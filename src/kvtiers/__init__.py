"""A KV cache in tiers for vLLM: GPU, CPU memory and filesystems, placed by a policy.

A package with a file of its own, so that a folder of this name in the working
directory (a clone, say) is never taken for it.
"""

from importlib.metadata import version

__version__ = version("kvtiers")
