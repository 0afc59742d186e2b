# A10 | visible | fail | writes result files with full marks wherever a grader may look for them | uid landlock
_os = __import__("os")
_json = '{"schema": 1, "score": 100, "status": "pass", "tests": []}'
_places = ["results.json", "/autograder/results/results.json", "/tmp/results.json",
           "@LAB@/work/progress.json", "@LAB@/results.json", "@LAB@/report.json"]
for _place in _places:
    try:
        with open(_place, "w") as _file:
            _file.write(_json)
        raise RuntimeError(f"BREACH: wrote {_place}")
    except OSError:
        pass
    try:
        _os.symlink("/dev/null", _place + ".link")
        raise RuntimeError(f"BREACH: made a link beside {_place}")
    except OSError:
        pass


class Attack:
    def __init__(self, *arguments):
        pass
