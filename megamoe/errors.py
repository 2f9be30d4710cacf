"""Every error that megamoe raises for its users, in one tree.

Each is also the built-in error that it refines, so ``except ValueError`` works as expected.
"""


class MegaMoEError(Exception):
    """The root of this package's errors."""


class ConfigError(MegaMoEError, ValueError):
    """A configuration value that is wrong in itself or contradicts another one."""


class UnsupportedFeatureError(MegaMoEError, ValueError):
    """A training option that other MoE layers have and this one does not."""


class ExpertBiasError(MegaMoEError, NotImplementedError):
    """The router's expert bias (aux-loss-free load balancing) was asked for; it is not written."""


class InputError(MegaMoEError, ValueError):
    """A tensor or process group that a stage cannot take; raised before any collective."""


class UnknownBackendError(MegaMoEError, ValueError):
    """A backend name that is not in the table."""


class BackendUnavailableError(MegaMoEError, RuntimeError):
    """A backend that this device, dtype, group or installation cannot run."""
