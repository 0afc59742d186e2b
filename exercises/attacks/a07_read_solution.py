# A7 | visible | fail | reads the reference solution from the disk and runs it as its own | landlock
_source = None
for _path in ("@LAB@/exercises/e02_block_pool/solution.py", "@LAB@/exercises/e02_block_pool/hidden.py",
              "/proc/1/root@LAB@/exercises/e02_block_pool/solution.py"):
    try:
        with open(_path) as _file:
            _source = _file.read()
    except OSError:
        pass
if _source is not None:
    raise RuntimeError("BREACH: read the solution")


class Attack:
    def __init__(self, *arguments):
        pass
