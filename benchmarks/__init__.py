"""Measures kvtiers against vLLM's own tiering, by scripts that anyone can run again."""
