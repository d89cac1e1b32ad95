"""The process that ranks are forked from starts to import while tests are collected."""

from tests import worlds

worlds.start()
