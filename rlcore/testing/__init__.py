"""Conformance suites: what every plugin of a kind must do, checked on any installed one.

`rlcore plugins test NAME` prints its report card. In a test suite of your own, one pytest test a check:

    from rlcore.testing import conformance

    test_conformance = conformance("my_plugin")
"""

from rlcore.testing.authors import conformance

__all__ = ["conformance"]
