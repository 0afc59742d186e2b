"""The process that student code runs in. Started by session.py as `python -I -S worker.py FD BOOT`.

It loads what a student may import, locks itself (sandbox.py), says so, and then serves one socket:
it runs what it is asked to and answers with plain data. It holds no case, no expected value and no
verdict, so nothing in here is worth stealing. Frames, all with the request's `id`:

    {"hello": pid, "isolation": [...]}                    once, unasked, when it is locked
    load {source, filename, entry, allowed, counted}      -> {"ok": true} | {"error": {...}}
    run {steps: [[op, on, name, args], ...], fresh}       -> {"ok": [outcome, ...], "counts"}
    while a `run` is under way, a call back to an object that lives in the grader:
    {"back": [remote name, method, args]}                 -> {"value": v} | {"raise": [...]}

op: `new` binds the variable `on` to NAME(*args); `call` is on.NAME(*args); `get` is on.NAME;
`fn` is the module's NAME(*args). outcome: ["v", value] or ["r", exception as data].
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import sys
import traceback
from types import ModuleType
from typing import Any


def main() -> None:
    """Load, lock, serve. Never returns: the process ends with the socket."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    boot = json.loads(sys.argv[2])
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    del sys.argv[1:]
    tools = _load_tools(root, boot["imports"], boot["paths"])
    sandbox = tools["sandbox"]
    held = sandbox.enter_namespaces() if boot["lock"] else []
    if held:
        _become_first_process(sock, sandbox)
    held += sandbox.set_rlimits(boot["limits"])
    if boot["lock"]:
        held += sandbox.drop_privileges() + sandbox.landlock() + sandbox.seccomp()
    sandbox.die_with_parent()
    Server(sock, tools["wire"], tools["counting"], held).serve()


def _load_tools(root: str, imports: list[str], paths: list[str]) -> dict[str, ModuleType]:
    """Import everything while files can still be read; then forget where the repository lies."""
    sys.path[:0] = [root, *paths]
    tools = {name: importlib.import_module(f"exercises.grader.{name}")
             for name in ("sandbox", "wire", "counting")}
    importlib.import_module("exercises.labkit")
    for name in imports:
        importlib.import_module(name)
    del sys.path[:1 + len(paths)]
    for name in [name for name in sys.modules if name.startswith("exercises")]:
        module = sys.modules[name]
        if name != "exercises" and not name.startswith("exercises.labkit"):
            del sys.modules[name]
        for attribute in ("__file__", "__path__", "__cached__", "__spec__"):
            if attribute == "__path__" and not hasattr(module, "__path__"):
                continue
            setattr(module, attribute, [] if attribute == "__path__" else None)
    sys.path_importer_cache.clear()
    return tools


def _become_first_process(sock: socket.socket, sandbox: ModuleType) -> None:
    """Fork into the new pid namespace; the parent only waits and ends the way the child ended.

    The child is the namespace's first process: when it dies, the kernel kills all the others.
    """
    child = os.fork()
    if child == 0:
        return
    send = importlib.import_module("json").dumps({"init": child}).encode()
    sock.sendall(len(send).to_bytes(4, "big") + send)
    sock.close()
    sandbox.die_with_parent()
    _, status = os.waitpid(child, 0)
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


class Server:
    """Answers the grader's requests about one student file, one at a time."""

    def __init__(self, sock: socket.socket, wire: ModuleType, counting: ModuleType,
                 held: list[str]):
        self.sock = sock
        self.wire = wire
        self.counting = counting
        self.held = held
        self.objects: dict[str, Any] = {}  # variable name -> what `new` made
        self.module: ModuleType | None = None
        self.filename = ""  # as the student knows it
        self.counted = False
        self.types = sys.modules["exercises.labkit"].WIRE_TYPES

    def serve(self) -> None:
        wire = self.wire
        wire.send_frame(self.sock, {"hello": os.getpid(), "isolation": self.held})
        while True:
            try:
                request = wire.receive_frame(self.sock)
            except wire.Closed:
                os._exit(0)
            reply = self._load(request) if request["op"] == "load" else self._run(request)
            self._answer({"id": request["id"], **reply})

    def _answer(self, reply: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, ValueError):  # the file is full, or closed by the student
            sys.stdout.flush()
        try:
            self.wire.send_frame(self.sock, reply)
        except self.wire.WireError as error:
            self.wire.send_frame(self.sock, {"id": reply["id"], "too_large": str(error)})

    # ----------------------------------------------------------------------------- load

    def _load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Check the imports, then run the file as the module `submission`."""
        import ast
        import linecache

        source, filename = request["source"], request["filename"]
        self.filename = filename
        lines = source.splitlines(keepends=True)
        linecache.cache[filename] = (len(source), None, lines, filename)
        try:
            tree = ast.parse(source, filename)
            banned = _banned_import(tree, request["allowed"])
            if banned is not None:
                return {"error": banned}
            self.module = self._execute(tree, filename, request["counted"])
        except BaseException as error:
            return {"error": self._failure(error)}
        defined = vars(self.module)
        missing = [name for name in request["entry"] if not callable(defined.get(name))]
        if missing:
            return {"error": {"kind": "missing", "message": ", ".join(missing)}}
        return {"ok": True}

    def _execute(self, tree: Any, filename: str, counted: bool) -> ModuleType:
        module = ModuleType("submission")
        module.__dict__["__file__"] = filename
        sys.modules["submission"] = module
        self.counted = counted
        if counted:
            tree = self.counting.rewrite(tree)
            module.__dict__["__builtins__"] = self.counting.counted_builtins()
            sys.modules["collections"].deque = self.counting.CountedDeque  # type: ignore[attr-defined]
        exec(compile(tree, filename, "exec", dont_inherit=True), module.__dict__)
        return module

    # ------------------------------------------------------------------------------ run

    def _run(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["fresh"]:
            self.objects.clear()
        outcomes = [self._step(*step) for step in request["steps"]]
        if not self.counted:
            return {"ok": outcomes}
        return {"ok": outcomes, "counts": self.counting.COUNTS.as_dict()}

    def _step(self, op: str, on: str, name: str, raw: list[Any]) -> list[Any]:
        """Do one thing; what came of it, as data. Nothing a student's code raises gets out."""
        try:
            arguments = self.wire.decode(raw, self.types, self._remote)
            if self.counted:
                arguments = [self.counting.instrument(value) for value in arguments]
            if op == "new":
                self.objects[on] = getattr(self.module, name)(*arguments)
                return ["v", None]
            if op == "get":
                value = getattr(self.objects[on], name)
            elif op == "call":
                value = getattr(self.objects[on], name)(*arguments)
            else:
                value = getattr(self.module, name)(*arguments)
            return ["v", self._encode(value)]
        except BaseException as error:
            return ["r", self._failure(error)]

    def _encode(self, value: Any) -> Any:
        if self.counted:
            return self.wire.encode(value, self.types, self.counting.unwrap)
        return self.wire.encode(value, self.types)

    def _failure(self, error: BaseException) -> dict[str, Any]:
        """An exception as data: its type and bases, its message, and the student's line it left."""
        try:
            message = str(error)[:500]
        except BaseException:
            message = ""
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
                 if frame.filename == self.filename]
        if isinstance(error, SyntaxError):
            lines.append(error.lineno)
        kind = type(error)
        return {
            "kind": "raised",
            "type": kind.__name__[:80],
            "bases": [f"{base.__module__}.{base.__qualname__}"[:120] for base in kind.__mro__],
            "message": message,
            "line": lines[-1] if lines else None,
        }

    # ------------------------------------------------------------------------- call back

    def _remote(self, name: str) -> Any:
        return Remote(self, name)

    def call_back(self, name: str, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call an object that lives in the grader, and wait for its answer."""
        wire = self.wire
        encoded = [self._encode(value) for value in arguments]
        wire.send_frame(self.sock, {"back": [name, method, encoded]})
        answer = wire.receive_frame(self.sock)
        if "raise" in answer:
            kind, message = answer["raise"]
            known = sys.modules["exercises.labkit"].__dict__
            raise known.get(kind, {"ValueError": ValueError}.get(kind, RuntimeError))(message)
        return wire.decode(answer["value"], self.types, self._remote)


class Remote:
    """A grader-side object as a student sees it: each method call goes over the wire."""

    def __init__(self, server: Server, name: str):
        self._server = server
        self._name = name

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *arguments: self._server.call_back(self._name, method, arguments)


def _banned_import(tree: Any, allowed: list[str]) -> dict[str, Any] | None:
    """The first import that the exercise does not allow, or None. A courtesy, not the defence."""
    import ast

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
        else:
            continue
        for name in names:
            if name not in allowed and not any(name.startswith(f"{top}.") for top in allowed):
                return {"kind": "import", "message": name, "line": node.lineno}
    return None


if __name__ == "__main__":
    main()
