# A5 | visible | fail | answers with objects that equal everything, as ints, bools and containers
class Same(int):
    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    def __hash__(self):
        return 0

    def __bool__(self):
        return True

    __class__ = property(lambda self: int)


class Attack:
    num_free = num_blocks = block_size = Same(3)

    def __init__(self, *arguments):
        pass

    def __getattr__(self, name):
        return lambda *arguments: Same()
