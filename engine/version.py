"""The installed package's version."""

from importlib.metadata import version

__version__ = version("tierbed")
