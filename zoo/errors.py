"""Mistakes of the user's, each told in one line."""

from __future__ import annotations


class UserError(ValueError):
    """A request that can't be met (a prompt longer than the context); `str()` is one line."""

    exit_code = 1


class UsageError(UserError):
    """A wrong flag or argument; commands exit with code 2."""

    exit_code = 2
