# A22 | visible | fail | raises for everything, as every refusal test would like
class Attack:
    num_free = num_blocks = 3
    block_size = 16

    def __init__(self, *arguments):
        pass

    def __getattr__(self, name):
        def refuse(*arguments):
            raise ValueError("no")

        return refuse
