"""The settings in force in this process.

`patch_control` sets them. A public function reads them if its caller gives no settings, and passes them on. No other
code reads them.
"""

from __future__ import annotations

from ascend_parallel.settings import Settings


class _Current:
    settings = Settings()


def put_in_force(settings: Settings) -> None:
    """Make `settings` the default of this process."""
    _Current.settings = settings


def current_settings() -> Settings:
    """Return the settings in force."""
    return _Current.settings
