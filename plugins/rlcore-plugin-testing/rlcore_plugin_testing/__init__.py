"""Conformance suites: requirements on every plugin of a kind, checked on any installed one.

`rlcore plugins test NAME` prints its report card. In your own test suite, one pytest test per check:

    from rlcore_plugin_testing import conformance

    test_conformance = conformance("my_plugin")
"""

from rlcore_plugin_testing.authors import conformance

__all__ = ["conformance"]
