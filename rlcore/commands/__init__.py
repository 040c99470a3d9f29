"""rlcore's own commands. Each is a plugin `command.NAME`, like a third-party command."""

SUMMARIES = {
    "train": "train a model: rlcore train algo=NAME [OVERRIDE ...]",
    "eval": "measure a run or model on held-out prompts, or compare: rlcore eval RUN_OR_MODEL [SECOND] [OVERRIDE ...]",
    "compare": "compare two runs or models: rlcore compare A B [--training] [OVERRIDE ...]",
    "config": "compose, check and print a config: rlcore config algo=NAME [OVERRIDE ...]",
    "plugins": "list the installed plugins with their origin and faults",
    "new-plugin": "write a new plugin's distribution: rlcore new-plugin NAME [--kind KIND] [--dir DIR]",
    "serve": "answer agents as OpenAI's API does: rlcore serve RUN_OR_MODEL [--port PORT] [OVERRIDE ...]",
    "export": "write the trained model to a folder or the hub: rlcore export RUN [FOLDER] [--merge] [--push ORG/NAME]",
    "samples": "show a run's samples and their rewards: rlcore samples RUN [--step N]",
}
"""`rlcore --help` shows these without importing a command."""
