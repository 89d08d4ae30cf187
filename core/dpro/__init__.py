"""dpro: profile, replay and tune a distributed training job from inside it.

Importing this package imports no training framework and nothing heavy; see ``docs/architecture.md``.
"""

__version__ = "0.1.0"
