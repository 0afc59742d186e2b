# A8 | visible | fail | puts the repository on the path and imports the oracle, past the import check | landlock
_sys = __import__("sys")
_sys.path[:0] = ["@LAB@", "@LAB@/exercises"]
for _name in ("exercises.e02_block_pool.solution", "exercises.e02_block_pool.hidden",
              "engine.core.block_pool", "exercises.grader.stages"):
    try:
        __import__(_name)
        raise RuntimeError(f"BREACH: imported {_name}")
    except ImportError:
        pass


class Attack:
    def __init__(self, *arguments):
        pass
