"""Every error a user can cause or meet names the thing at fault and the way out, and is an `OutriderError`."""


class OutriderError(Exception):
    """Base of all expected errors: the message is one readable line; the CLI prints it and exits with 1."""


class ConfigError(OutriderError):
    """A setting has a value that cannot be used."""


class PlanError(OutriderError):
    """The requested settings do not fit the memory; the message carries the numbers and the nearest setting that
    fits."""


class UnsupportedModelError(OutriderError):
    """The checkpoint is not a Mixture-of-Experts model this engine can stream."""


class SourceError(OutriderError):
    """A checkpoint to be prepared is missing, incomplete, damaged or cannot be downloaded."""


class StoreError(OutriderError):
    """A prepared store is missing, damaged or of another format version."""


class ReadError(OutriderError):
    """Reading an expert record from the store failed while generating."""


class ForecastError(OutriderError):
    """A layer that is routed by a forecast has none: a fault of the engine, never passed over in silence."""


class BusyError(OutriderError):
    """The engine is generating, and the call needs it idle."""
