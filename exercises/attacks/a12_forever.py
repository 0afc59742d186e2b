# A12 | visible | timeout | loops for ever and ignores every signal
_signal = __import__("signal")


class Attack:
    def __init__(self, *arguments):
        for number in range(1, 65):
            try:
                _signal.signal(number, _signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        while True:
            pass
