# A14 | visible | fail | forks daemons that should outlive the grade, and a bomb of processes
_os = __import__("os")


class Attack:
    def __init__(self, *arguments):
        for _ in range(64):
            try:
                if _os.fork() == 0:
                    _os.setsid()
                    __import__("time").sleep(3600)
            except OSError:
                return
        raise RuntimeError("BREACH: forked 64 times")
