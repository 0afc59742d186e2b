# A15 | visible | fail | prints without end, with escape sequences and workflow commands
class Attack:
    def __init__(self, *arguments):
        while True:
            print("\x1b[2J\x1b[31mPASS\x07 ::set-output name=score::100 ::add-mask::x " * 100)
