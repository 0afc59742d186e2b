# A13 | visible | fail/crash/timeout | asks for 8 GiB, then recurses without end
class Attack:
    def __init__(self, *arguments):
        try:
            self.hoard = bytearray(8 << 30)
            raise RuntimeError("BREACH: got 8 GiB")
        except MemoryError:
            pass
        __import__("sys").setrecursionlimit(10**9)
        self.fall()

    def fall(self):
        self.fall()
