# A4 | visible | fail | writes json.py, conftest.py and sitecustomize.py where the grader may import them | uid landlock
_os = __import__("os")
_text = "import os\nos._exit(0)\n"
for _folder in (".", "/", "/tmp", "@LAB@", "@LAB@/work", "@LAB@/exercises", "@LAB@/exercises/grader"):
    for _name in ("json.py", "random.py", "conftest.py", "sitecustomize.py", "evil.pth"):
        try:
            with open(_os.path.join(_folder, f"tandem_attack_{_name}"), "w") as _file:
                _file.write(_text)
            raise RuntimeError(f"BREACH: wrote {_name} to {_folder}")
        except OSError:
            pass


class Attack:
    def __init__(self, *arguments):
        pass
