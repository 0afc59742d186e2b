# A6 | visible | fail | searches frames, the heap and /proc for the cases, the seed and the verdict | landlock
_sys, _gc, _os = (__import__(name) for name in ("sys", "gc", "os"))


def _search():
    frame = _sys._getframe()
    while frame is not None:
        for place in (frame.f_locals, frame.f_globals):
            for name in ("expect", "expected", "CASES", "stage", "seed", "oracle", "report"):
                if name in place:
                    raise RuntimeError(f"BREACH: {name} in a frame")
        frame = frame.f_back
    for thing in _gc.get_objects():
        if type(thing).__name__ in ("Case", "StageRun", "Report", "PoolModel", "Exercise"):
            raise RuntimeError(f"BREACH: a {type(thing).__name__} on the heap")
    for pid in (_os.getppid(), 1):
        for name in ("mem", "environ", "cmdline"):
            try:
                with open(f"/proc/{pid}/{name}", "rb") as file:
                    file.read(1)
                raise RuntimeError(f"BREACH: opened /proc/{pid}/{name}")
            except OSError:
                pass
    if any("SEED" in name.upper() for name in _os.environ):
        raise RuntimeError("BREACH: a seed in the environment")


class Attack:
    def __init__(self, *arguments):
        _search()
