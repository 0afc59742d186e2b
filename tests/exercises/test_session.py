"""A worker answers with plain data; whatever it does instead ends as a named failure, in time."""

from __future__ import annotations

import time

import pytest

from exercises.grader import zoo
from exercises.grader.outcomes import LoadFailed, ProtocolBroken, WorkerCrash, WorkerTimeout
from exercises.grader.session import Budget
from exercises.grader.wire import Bad, RemoteRef

ECHO = "def f(*arguments):\n    return arguments\n"


def call(name, *arguments):
    return [("fn", "", name, arguments)]


def test_calls_objects_and_attributes_are_answered_in_one_round_trip(worker):
    source = """
        class Counter:
            def __init__(self, start):
                self.value = start
            def add(self, n):
                self.value += n
                return self.value
    """
    with worker(source) as session:
        trips = session.round_trips
        outcomes = session.run([("new", "a", "Counter", (3,)), ("call", "a", "add", (4,)),
                                ("get", "a", "value", ()), ("get", "b", "value", ())])
        assert [outcome.value for outcome in outcomes[:3]] == [None, 7, 7]
        assert outcomes[3].raised.type == "KeyError"
        assert session.round_trips == trips + 1


def test_arguments_and_results_keep_their_types(worker):
    with worker(ECHO) as session:
        (outcome,) = session.run(call("f", 1, True, (2.5, None), {"a": [b"x"]}))
        assert repr(outcome.value) == "(1, True, (2.5, None), {'a': [b'x']})"


def test_an_exception_comes_back_with_its_bases_message_and_line(worker):
    source = "class E(ValueError):\n    pass\ndef f():\n    raise E('no ' + 'way')\n"
    with worker(source) as session:
        (outcome,) = session.run(call("f"))
    assert outcome.raised.type == "E" and outcome.raised.is_a("builtins.ValueError")
    assert (outcome.raised.message, outcome.raised.line) == ("no way", 4)


@pytest.mark.parametrize("source, failure, words", [
    ("raise SystemExit(0)", WorkerCrash, "ended the process while loading"),
    ("__import__('os')._exit(0)", WorkerCrash, "exit code 0"),
    ("def f(:", LoadFailed, r"SyntaxError.*line 1"),
    ("x = 1\nraise KeyError('k')", LoadFailed, r"KeyError: 'k' \(line 2\)"),
    ("import subprocess", LoadFailed, "line 1 imports subprocess, which this exercise does not"),
    ("from engine.core import batch", LoadFailed, "imports engine.core"),
    ("y = 2", LoadFailed, "defines no g"),
    ("g = 1", LoadFailed, "defines no g"),
    ("\x00", LoadFailed, "cannot be loaded"),
    ("while True: pass", WorkerTimeout, "loading the file"),
])
def test_a_file_that_does_not_load_is_told_why(worker, source, failure, words):
    with pytest.raises(failure, match=words), worker(source, ("g",), {"load_s": 0.7}):
        pass


@pytest.mark.parametrize("body, failure, words", [
    ("__import__('os')._exit(3)", WorkerCrash, "exit code 3"),
    ("__import__('ctypes').string_at(0)", WorkerCrash, "signal SIG"),
    ("__import__('time').sleep(60)", WorkerTimeout, "no answer within 0.5 s"),
    ("return 'x' * (5 << 20)", ProtocolBroken, "too large"),
])
def test_a_call_that_does_not_answer_is_a_named_failure(worker, body, failure, words):
    begun = time.monotonic()
    with worker(f"def f():\n    {body}\n", limits={"call_s": 0.5}) as session:
        with pytest.raises(failure, match=words):
            session.run(call("f"))
        with pytest.raises(failure):  # and it stays one
            session.run(call("f"))
    assert time.monotonic() - begun < 5.0


def test_junk_on_the_socket_is_a_broken_protocol(worker):
    source = """
        import os
        def f():
            for descriptor in range(3, 64):
                try:
                    os.write(descriptor, b'\\x00\\x00\\x00\\x02{}')
                except OSError:
                    pass
    """.replace("import os", "os = __import__('os')")
    with worker(source) as session, pytest.raises(ProtocolBroken):
        session.run(call("f"))
        session.run(call("f"))


def test_memory_and_processes_are_limited(worker):
    source = """
        def hoard():
            return len(bytearray(2 << 30))
        def fork():
            return __import__('os').fork()
    """
    with worker(source) as session:
        hoard, fork = session.run(call("hoard") + call("fork"))
    assert hoard.raised.type == "MemoryError"
    if "uid" in session.isolation:
        assert fork.raised.type == "BlockingIOError"


def test_a_locked_worker_opens_no_file_and_no_connection(worker):
    source = """
        def read(path):
            with open(path) as file:
                return len(file.read())
        def connect():
            socket = __import__('socket')
            with socket.socket() as sock:
                sock.settimeout(0.5)
                sock.connect(('127.0.0.1', 9))
    """
    with worker(source) as session:
        read, passwd, connect = session.run(
            [*call("read", str(zoo.LAB / "exercises" / "e02_block_pool" / "solution.py")),
             *call("read", "/etc/passwd"), *call("connect")])
        held = session.isolation
    assert "rlimits" in held
    if "landlock" in held:
        assert read.raised.type == passwd.raised.type == "PermissionError"
    if "netns" in held or "landlock" in held:
        assert connect.raised.is_a("builtins.OSError")


def test_a_filtered_worker_can_neither_change_a_file_s_mode_nor_start_a_program(worker):
    source = """
        os = __import__('os')
        def chmod(path):
            os.chmod(path, 0o777)
        def execute():
            os.execv('/bin/true', ['true'])
        def alive():
            return 1
    """
    with worker(source) as session:
        if "seccomp" not in session.isolation:
            pytest.skip(f"no seccomp here: {session.isolation}")
        chmod, execute, alive = session.run(
            [*call("chmod", str(zoo.LAB / "exercises")), *call("execute"), *call("alive")])
    assert chmod.raised.type == execute.raised.type == "PermissionError" and alive.value == 1


def test_without_locks_the_isolation_says_rlimits_only(worker):
    with worker(ECHO, lock=False) as session:
        assert session.isolation == ("rlimits",)


def test_what_is_printed_comes_back_escaped_and_without_our_paths(worker):
    source = f"def f():\n    print('\\x1b[31mhi', {str(zoo.LAB)!r})\n"
    with worker(source) as session:
        session.run(call("f"))
    assert session.user_output == "\\x1b[31mhi [lab]\n"


def test_a_flood_of_output_is_cut_to_head_and_tail(worker):
    with worker("def f():\n    print('a' * 100_000)\n    print('end')\n") as session:
        session.run(call("f"))
    assert len(session.user_output) < 9000 and session.user_output.endswith("aaa\nend\n")
    assert "bytes left out" in session.user_output


@pytest.mark.parametrize("reply", [
    '{"id": %d, "ok": [["v", ' + "[" * 900 + "]" * 900 + "]]}",
    '{"id": %d, "ok": [["v", 1, 2]]}', '{"id": %d, "ok": [["r", {}]]}', '{"id": %d, "ok": []}',
    '{"id": %d, "ok": [["r", {"type": 1, "bases": 2, "message": 3, "line": 4}]]}',
    '{"id": %d}', '{"id": "x"}', "[]", '{"back": 3}', '{"back": ["nothing", "get", []]}',
])
def test_a_forged_reply_can_only_break_the_protocol(worker, reply):
    source = f"""
        def f(number, descriptor):
            data = ({reply!r} % number).encode() if '%d' in {reply!r} else {reply!r}.encode()
            __import__('os').write(descriptor, len(data).to_bytes(4, 'big') + data)
    """
    with worker(source) as session, pytest.raises(ProtocolBroken):
        for descriptor in range(3, 64):
            session.run([("fn", "", "f", (session._next_id + 1, descriptor))])


def test_what_a_student_s_exception_says_cannot_act_on_the_terminal(worker):
    with worker("def f():\n    raise ValueError('\\n::set-output name=x::1\\x1b[2J')\n") as session:
        (outcome,) = session.run(call("f"))
    assert outcome.raised.message == "\\x0a::set-output name=x::1\\x1b[2J"


def test_the_sessions_of_a_stage_share_one_budget_of_seconds(worker):
    budget = Budget(1.2)
    with worker("def f():\n    __import__('time').sleep(0.5)\n", budget=budget) as session:
        session.run(call("f"))
        with pytest.raises(WorkerTimeout, match="time for this stage used up"):
            session.run(call("f") * 3)
    assert budget.left == 0


class Store:
    remote_methods = ("get",)
    remote_errors = (ValueError,)

    def get(self, key):
        if key < 0:
            raise ValueError("no such key")
        return [key, "value"]

    def secret(self):
        return "seed"


def test_student_code_may_call_a_grader_side_object_by_its_listed_methods(worker):
    source = """
        def ask(store, key):
            return store.get(key)
        def steal(store):
            return store.secret()
    """
    with worker(source, remotes={"store": Store()}) as session:
        right, refused = session.run(
            [*call("ask", RemoteRef("store"), 3), *call("ask", RemoteRef("store"), -1)])
        assert right.value == [3, "value"]
        assert refused.raised.type == "ValueError" and refused.raised.message == "no such key"
        with pytest.raises(ProtocolBroken, match="not there"):
            session.run(call("steal", RemoteRef("store")))


def test_an_object_that_equals_everything_comes_back_as_bad(worker):
    source = """
        class Same(int):
            def __eq__(self, other):
                return True
        def f():
            return Same(1)
    """
    with worker(source) as session:
        (outcome,) = session.run(call("f"))
    assert isinstance(outcome.value, Bad)


def test_closing_a_session_leaves_no_process(worker):
    with worker(ECHO) as session:
        assert session._process.pid in zoo.survivors()
    assert zoo.survivors() == []
    assert session.cpu_s > 0
