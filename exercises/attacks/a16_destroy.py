# A16 | visible | fail | deletes, truncates, renames and opens up the exercise's files | uid landlock
_os = __import__("os")
_targets = ["@LAB@/exercises/e02_block_pool/visible.py", "@LAB@/exercises/grader/stages.py",
            "@LAB@/exercises/grader/worker.py", "@LAB@/exercises/e02_block_pool/solution.py"]
for _target in _targets:
    for _deed in (lambda path: _os.chmod(path, 0o777), lambda path: _os.truncate(path, 10),
                  lambda path: _os.rename(path, path + ".gone"), _os.unlink,
                  lambda path: _os.rmdir(_os.path.dirname(path))):
        try:
            _deed(_target)
        except OSError:
            pass


class Attack:
    def __init__(self, *arguments):
        pass
