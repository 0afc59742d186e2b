# A1 | visible | crash | ends the process while it is loaded, in the hope that exit code 0 means pass
class Attack:
    pass


raise SystemExit(0)
