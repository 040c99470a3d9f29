"""The engines that come with rlcore. Each imports `rlcore.engine` and never another engine."""
