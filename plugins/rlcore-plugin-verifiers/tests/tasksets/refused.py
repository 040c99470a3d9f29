"""Tasksets that rlcore cannot play; `write` makes a module refused_NAME of each."""

HEAD = """
import verifiers.v1 as vf
__all__ = ["Refused"]
class Data(vf.TaskData):
    pass
class Task(vf.Task[Data]):
{body}
class Refused(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        return [Task(Data(prompt=f"{{n}}"), self.config.task) for n in range(4)]
"""
BODIES = {
    "container": "    NEEDS_CONTAINER = True",
    "runtime": "    @vf.reward\n    async def runs(self, trace, runtime) -> float:\n        return 1.0",
    "intercept": "    @vf.intercept\n    async def change(self, request: vf.Request):\n        return request",
    "request": "    @vf.stop\n    async def early(self, request: vf.Request) -> bool:\n        return False",
    "setup": (
        "    async def setup(self, trace, runtime):\n        await runtime.write('a', b'')\n"
        "    @vf.reward\n    async def one(self, trace) -> float:\n        return 1.0"
    ),
    "unscored": "    pass",
}


def write(folder):
    """Write the modules refused_NAME.py."""
    for name, body in BODIES.items():
        (folder / f"refused_{name}.py").write_text(HEAD.format(body=body))
