"""The simulator: traces of requests, replayed through the policies of a live engine.

Nothing in here knows an engine. What decides is the code that decides live: the policy
classes and, over several tiers, the hierarchy itself, on a virtual clock.
"""
