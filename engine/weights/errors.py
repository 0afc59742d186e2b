"""What can be wrong with a model somebody names: each error is one sentence with the way out."""

from __future__ import annotations

from engine.core.errors import ConfigError, TandemError


class ModelNotFound(ConfigError):
    """A model name or directory that leads nowhere; the message lists the known names."""


class UnsupportedModel(ConfigError):
    """A model that asks for something not computed here; refused by that thing's name."""


class TooLargeModel(ConfigError):
    """Weights for which the memory is not there; the message has their size."""


class WeightsError(TandemError):
    """A checkpoint that does not fit its model: missing, unexpected, misshapen or unreadable."""


class PullError(TandemError):
    """A model that could not be fetched or converted."""
