# A2 | visible | crash | ends the process with exit code 0 in its first call
class Attack:
    def __init__(self, *arguments):
        __import__("os")._exit(0)
