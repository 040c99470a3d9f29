"""Automatic placement and parallel layout of any algorithm (HybridFlow, arXiv 2409.19256, section 6).

`record` finds an algorithm's dataflow by running its step once on a tiny model; `training`, `inference` and
`generation` say what a call takes, `memory` what it holds, from a device profile; `search` finds the best placement.
"""
