"""The small changes that tests/core/mutate.py tries, and the survivors that are no loss.

A change knows its line, a name that stays the same when lines move, and how to apply itself to the
tree it was found in.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SHORTCUT = "a shortcut: the general way after it gives the same"
NOTHING = "with nothing to do, doing it changes nothing"
NEVER = "the other side of this condition is never reached"
NUMBERS = "only the order of the numbers counts"
FALSY = "whoever asks takes None for no"
SAME = "only more cautious: another condition holds as well, or the steps repeat all the same"
UNREAD = "this value is never looked at"

# (where, part of the change's name) -> why no test can tell the difference
EQUIVALENT: dict[tuple[str, str], str] = {
    ("block_pool.BlockPool.take", "if num_blocks == 1 -> if False"): SHORTCUT,
    ("block_pool.BlockPool.take", "len(blocks) < num_blocks -> "): NOTHING,
    ("block_pool.BlockPool._evict", "if self.keys -> if True"): SHORTCUT,
    ("block_pool.BlockPool.release", "(not self.extra.keys().isdisjoint(blocks)) -> "): SHORTCUT,
    ("block_pool.BlockPool.release", "(not keys.keys().isdisjoint(blocks)) -> "): SHORTCUT,
    ("block_pool.BlockPool.release", "min(set(blocks) - self.used) -> max"):
        "which of several wrong blocks is named",
    ("cohort.Cohort.__init__", "0 -> 1 in self._number = 0"): NUMBERS,
    ("cohort.Cohort._join", "1 -> 2 in self._number += 1"): NUMBERS,
    ("cohort.Cohort.schedule", "return False -> return None"): FALSY,
    ("cohort.Cohort._grow", "return False -> return None"): FALSY,
    ("cohort.Cohort._grow", "> self._manager.pool.num_free -> GtE"):
        "a refusal leads to the rows one by one, which gives the same",
    ("cohort.Cohort.advance", "self.computed + 1 -> Sub"): NOTHING,
    ("block_pool.BlockPool.release", "if evictable -> if True"): NOTHING,
    ("block_pool.BlockPool._unindex", "if keys.keys().isdisjoint(blocks) -> if False"): SHORTCUT,
    ("block_pool.BlockPool._unindex", "return -> pass"): SHORTCUT,
    ("block_pool.BlockPool._forget", "indexed != blocks -> if True"): SHORTCUT,
    ("block_pool.BlockPool.check", "or min(self.extra.values(), (2)"):
        "without used blocks any number of at least 1 says that all is well",
    ("block_manager.BlockManager._extend", "num_blocks > 0 -> "): NEVER,
    ("block_manager.BlockManager.publish", "full > request.num_published -> GtE"): NOTHING,
    ("block_manager.BlockManager.publish", "-> without full > request.num_published"): NOTHING,
    ("block_manager.BlockManager.free", "if content -> if True"): NOTHING,
    ("block_manager.BlockManager.find_hit", "len(hit) < longest -> LtE"): NOTHING,
    ("block_manager.BlockManager.grow_each", "if self._emit is not None -> if True"): SHORTCUT,
    ("block_manager.BlockManager.find_hit", "break -> continue"): NEVER,
    ("errors.LogError.__init__", "super().__init__(message, line) -> pass"):
        "BaseException.__new__ keeps the arguments already",
    ("events.EventLog._give_up", "2 -> 3 in warnings.warn"): "which line a warning points at",
    ("events.EventLog.close", "-> without not self._file.closed"):
        "closing a closed file does nothing",
    ("events._open", "if mode == 'rt' -> if True"): "what is written is ASCII",
    ("events._read", "1 -> 2 in header = json.loads(next(lines, (1, ''))[1]) (2)"): UNREAD,
    ("eviction.Lru.victims", "if not stale -> if False"): SHORTCUT,
    ("eviction.Fifo.__init__", " in self._turns"): "only the order of ages counts",
    ("eviction.Fifo.cached", " in self._turns"): "only the order of ages counts",
    ("insight.explain", "… if request.parent is not None -> without if"): NEVER,
    ("insight.BlockWatch.read", " != 'e' -> without if"): UNREAD,
    ("insight.BlockWatch.read", "'e' -> 'eX' in self.emit(event['e'], **{key: value for key, "
                                "value in event. (2)"): UNREAD,
    ("intake._check_fork", "-> without ours is None"): "both or none are None: tested before",
    ("intake._check_fork", "-> without theirs is None"): "both or none are None: tested before",
    ("phases.StepPhases._add_row", "end // self.config.block_size"): NOTHING,
    ("phases.StepPhases._chunk", "wanted > cap -> GtE"): "min of two equal numbers",
    ("phases.StepPhases._continue_one", "break -> continue"): "the loop's condition is false then",
    ("phases.StepPhases._continue_one", "start + count > request.writable -> GtE"): NOTHING,
    ("phases.StepPhases._roll_back", "i > index -> GtE"): "i == index was filtered out",
    ("phases.StepPhases._swap_in", "return False -> return None"): "both are false",
    ("phases.StepPhases._admit", "return False -> return None"): "both are false",
    ("phases.StepPhases._block", "return False -> return None"): "both are false",
    ("phases.StepPhases.admit_waiting", "if self.swapped -> if True"): NOTHING,
    ("phases.StepPhases._decode_as_cohort", "return False -> return None"): FALSY,
    ("phases.StepPhases._decode_as_cohort", "False -> True in return False"): NOTHING,
    ("phases.StepPhases._decode_as_cohort", "return True -> return None"): NOTHING,
    ("phases.StepPhases._decode_as_cohort", "True -> False in return True"): NOTHING,
    ("phases.StepPhases._decode_as_cohort", "for request in candidates]) -> if True"): SHORTCUT,
    ("phases.StepPhases._preempt", "self.cohort.leave(victim) -> pass"):
        "where rows are looked at one by one, there is no cohort any more",
    ("phases.StepPhases._decode_together", "request.own_computed -> Add"): SHORTCUT,
    ("phases.StepPhases._decode_together", "if tokens != 1 -> without if"): SHORTCUT,
    ("phases.StepPhases._decode_together", "num_free -> if True"): SHORTCUT,
    ("phases.StepPhases._decode_together", "-> GtE"): SHORTCUT,
    ("phases.StepPhases._decode_together", "return 0 -> return None"): "a slice from None is all",
    ("phases.StepPhases._decode_together", "return count -> return None"):
        "all are looked at again then, and want nothing more",
    ("phases.StepPhases._decode_together", "if not slots % size -> without if"): NOTHING,
    ("phases.StepPhases._decode_together", "slots % size -> FloorDiv"): NOTHING,
    ("phases.StepPhases._decode_together", "num_prompt -> without if"): NOTHING,
    ("phases.StepPhases._decode_together", "-> without request.own_computed <= "): NOTHING,
    ("phases.StepPhases._decode_together", "request.num_prompt -> Lt"): NOTHING,
    ("phases.StepPhases.publish_filled", "step.filled = [] -> pass"): NOTHING,
    ("policies.Mixed.refuses", "return None -> pass"): "a function without return returns None",
    ("policies.Recompute.preempt", "return False -> return None"): "both are false",
    ("policies.Swap.preempt", "return False -> return None"): "both are false",
    ("policies.Recompute", "in name = "): "the registry sets the name",
    ("policies.Swap", "in name = "): "the registry sets the name",
    ("policies.Static", "in _forming = False"): "nobody runs before the first step: it is open",
    ("registry.module", "in T = TypeVar"): "the name of a type variable",
    ("params.SamplingParams._rules", "1e+308"): "no float lies between",
    ("request._extend_given_keys", "len(keys) < given -> "): NOTHING,
    ("request._extend_given_keys", "1 -> 2 in first = "): "other keys of its own, as good",
    ("request.Request.__init__", "self.number = 0"): UNREAD,  # before it joins a cohort
    ("request.Request.__init__", "self.grows_at = 0"): UNREAD,
    ("request.StepClock.__init__", "0 -> 1"): "counters are offsets from it, wherever it starts",
    ("request.num_given_keys", "-> without ()"): NEVER,
    ("request.extend_keys", "have >= num_blocks -> "): SHORTCUT,
    ("scheduler.Scheduler.__init__", "0 -> 1 in self._seq"): "only the order of places counts",
    ("scheduler.Scheduler._arrive", "1 -> 2 in self._seq"): "only the order of places counts",
    ("scheduler.Scheduler._arrive", "return False -> return None"): "both are false",
    ("scheduler.Scheduler._arrive", "-> without parent.num_output"):
        "the child is put into the line a moment later, in the same step",
    ("scheduler.Scheduler.commit", "if not self._in_flight -> if True"):
        "under look-ahead schedule() and commit() dissolve a cohort before they use it",
    ("scheduler.Scheduler.reject", "'reject' -> 'rejectX' in self._inbox"):
        "what is no newcomer and no abort is a refusal",
    ("scheduler.Scheduler.schedule", "if self._parents -> if True"): NOTHING,
    ("scheduler.Scheduler._commit_tokens", "if batch.partial -> if True"): NOTHING,
    ("scheduler._all_there", "-> if False"): SHORTCUT,
    ("scheduler._all_there", "len(partial) -> Sub"): SHORTCUT,
    ("scheduler._all_there", "0 -> 1 in if tokens"): SHORTCUT,
    ("scheduler._all_there", "-> And"): SHORTCUT,
    ("scheduler._all_there", "-> without kinds"): SHORTCUT,
    ("scheduler._all_there", "-> Lt"): SHORTCUT,
    ("scheduler._all_there", "-> return None"): SHORTCUT,
    ("scheduler.Scheduler._commit_tokens", "in request.stop_ids -> if True"): SHORTCUT,
    ("policies.WaitingQueue.refresh", "-> without self._heap"): NOTHING,
    ("stable.stable_steps", "steps > 1 and (steps // size + 1) * rows > free -> "): SHORTCUT,
    ("stable.stable_steps", "(steps // size + 1) * rows > free -> GtE"): SHORTCUT,
    ("stable.stable_steps", "steps // size -> Mult"): SHORTCUT,
    ("stable.stable_steps", "1 -> 2 in while steps > 1 and"): SHORTCUT,
    ("stable.stable_steps", "-> without not cohort.in_step"): SAME,
    ("stable.stable_steps", "-> without rows != len(scheduler.running)"): SAME,
    ("stable.stable_steps", "-> without scheduler.has_news()"): SAME,
    ("stable._stays_blocked", "-> without step.started"): SAME,
    ("stable._stays_blocked", "-> without reason == 'blocks'"): SAME,
    ("stable._stays_blocked", "return False -> return None"): FALSY,
    ("stable.stable_steps", "-> without batch.preempted"): "then somebody waits or is swapped",
    ("stable.stable_steps", "-> without batch.overlapped"): "Batch.stable_steps() says 1 then",
    ("stable._stays_blocked", "-> without scheduler.blocked is None"): "then the step preempted: 1",
    ("stable.stable_steps", "steps > 1 -> GtE"): "max(steps, 1) mends it",
}


def reason(key: str) -> str | None:
    """Why this survivor (by its key, as mutate.py prints it) is no loss, if it is none."""
    where, _, change = key.partition(": ")
    return next((why for (place, part), why in EQUIVALENT.items()
                 if where == place and part in change), None)

COMPARES = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
            ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn,
            ast.NotIn: ast.In}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
             ast.Mod: ast.FloorDiv, ast.Div: ast.Mult, ast.BitOr: ast.BitAnd,
             ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass
class Change:
    line: int
    name: str
    apply: Callable[[], None]


def changes(tree: ast.Module) -> Iterator[Change]:
    """All changes of a module, each to be applied to a tree of its own."""
    seen: Counter[str] = Counter()
    for change in _Finder().visit_block(tree, "module"):
        seen[change.name] += 1
        if seen[change.name] > 1:
            change.name += f" ({seen[change.name]})"
        yield change


class _Finder:
    """Walks statements and expressions; passes over what is no behaviour: docstrings, annotations,
    imports, asserts (they are for our own bugs), protocols, type checking, representations."""

    statement_text = ""

    def visit_block(self, parent: ast.AST, where: str) -> Iterator[Change]:
        for field in ("body", "orelse", "finalbody", "handlers"):
            statements = getattr(parent, field, None)
            if isinstance(statements, list):
                for index, statement in enumerate(statements):
                    yield from self.statement(statements, index, statement, where)

    def statement(self, siblings: list, index: int, node: ast.AST, where: str) -> Iterator[Change]:
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Assert, ast.Global, ast.Pass)):
            return
        if isinstance(node, ast.ClassDef):
            if not any(ast.unparse(base).startswith("Protocol") for base in node.bases):
                yield from self.visit_block(node, node.name)
            return
        if isinstance(node, ast.FunctionDef):
            if node.name != "__repr__":
                inside = node.name if where == "module" else f"{where}.{node.name}"
                yield from self.defaults(node, inside)
                yield from self.visit_block(node, inside)
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # a docstring
        yield from self.left_out(siblings, index, node, where)
        yield from self.expressions(node, where)
        yield from self.visit_block(node, where)

    def left_out(self, siblings: list, index: int, node: ast.AST, where: str) -> Iterator[Change]:
        def replace(by: ast.stmt) -> Callable[[], None]:
            return lambda: siblings.__setitem__(index, ast.copy_location(by, node))

        text = ast.unparse(node).split("\n")[0]
        if isinstance(node, (ast.Expr, ast.AugAssign, ast.Raise, ast.Delete)) or isinstance(
                node, ast.Assign) and not isinstance(node.targets[0], ast.Name):
            yield Change(node.lineno, f"{where}: {text} -> pass", replace(ast.Pass()))
        elif isinstance(node, ast.Continue):
            yield Change(node.lineno, f"{where}: continue -> break", replace(ast.Break()))
        elif isinstance(node, ast.Break):
            yield Change(node.lineno, f"{where}: break -> continue", replace(ast.Continue()))
        elif isinstance(node, ast.Return) and node.value is not None \
                and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield Change(node.lineno, f"{where}: {text} -> return None",
                         replace(ast.Return(ast.Constant(None))))
        elif isinstance(node, ast.Return):
            yield Change(node.lineno, f"{where}: {text} -> pass", replace(ast.Pass()))

    def defaults(self, node: ast.FunctionDef, where: str) -> Iterator[Change]:
        self.statement_text = f"def {node.name}"
        for holder in (node.args.defaults, node.args.kw_defaults):
            for default in holder:
                if default is not None:
                    yield from self.tree(default, where)

    def expressions(self, node: ast.AST, where: str) -> Iterator[Change]:
        """The expressions of one statement, not those of the statements inside it."""
        self.statement_text = ast.unparse(node).split("\n")[0][:60]
        if isinstance(node, (ast.If, ast.While)):
            yield from self.condition(node, where)
        for field, value in ast.iter_fields(node):
            if field in ("body", "orelse", "finalbody", "handlers", "annotation", "type"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self.tree(child, where)

    def condition(self, node: ast.If | ast.While | ast.IfExp, where: str) -> Iterator[Change]:
        text = ast.unparse(node.test)
        # `while True` would only ever be found by the clock.
        for value in (True, False) if not isinstance(node, ast.While) else (False,):
            yield Change(node.test.lineno, f"{where}: if {text} -> if {value}",
                         lambda value=value: setattr(node, "test", ast.Constant(value)))

    def tree(self, top: ast.AST, where: str) -> Iterator[Change]:
        strict = {child for node in ast.walk(top) if isinstance(node, ast.keyword)
                  and node.arg == "strict" for child in ast.walk(node)}  # an assert by other means
        for node in ast.walk(top):
            if node not in strict:
                yield from self.expression(node, where)

    def expression(self, node: ast.AST, where: str) -> Iterator[Change]:
        def named(after: str) -> str:
            text = ast.unparse(node)
            place = f" in {self.statement_text}" if isinstance(node, ast.Constant) else ""
            return f"{where}: {text} -> {after}{place}"

        if isinstance(node, ast.Compare):
            for index, operator in enumerate(node.ops):
                other = COMPARES[type(operator)]
                yield Change(node.lineno, named(other.__name__),
                             lambda i=index, o=other: node.ops.__setitem__(i, o()))
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            other = OPERATORS[type(node.op)]
            yield Change(node.lineno, named(other.__name__),
                         lambda o=other: setattr(node, "op", o()))
        elif isinstance(node, ast.BoolOp):
            other = ast.Or if isinstance(node.op, ast.And) else ast.And
            yield Change(node.lineno, named(other.__name__),
                         lambda o=other: setattr(node, "op", o()))
            for index, operand in enumerate(node.values):
                yield Change(operand.lineno, named(f"without {ast.unparse(operand)}"),
                             lambda i=index: _without_operand(node, i))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            yield Change(node.lineno, named("without " + type(node.op).__name__),
                         lambda: _without_sign(node))
        elif isinstance(node, ast.IfExp):
            yield from self.condition(node, where)
        elif isinstance(node, ast.comprehension):
            for index, test in enumerate(node.ifs):
                yield Change(test.lineno, f"{where}: … if {ast.unparse(test)} -> without if",
                             lambda i=index: node.ifs.__setitem__(i, ast.Constant(True)))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) \
                and node.func.id in CALLS:
            yield Change(node.lineno, named(CALLS[node.func.id]),
                         lambda: setattr(node.func, "id", CALLS[node.func.id]))
        elif isinstance(node, ast.Constant):
            yield from self.constant(node, named)

    def constant(self, node: ast.Constant, named: Callable[[str], str]) -> Iterator[Change]:
        value = node.value
        if isinstance(value, bool):
            other: object = not value
        elif isinstance(value, (int, float)):
            other = value + 1
        elif isinstance(value, str) and value.isidentifier():
            other = value + "X"
        else:
            return  # texts: their tests quote them where it matters
        yield Change(node.lineno, named(repr(other)), lambda: setattr(node, "value", other))


def _without_operand(node: ast.BoolOp, index: int) -> None:
    """`x and y` becomes `y and y`, which is y: the syntax tree wants two operands."""
    del node.values[index]
    if len(node.values) == 1:
        node.values *= 2


def _without_sign(node: ast.UnaryOp) -> None:
    """`not x` becomes bool(x), `-x` becomes +x."""
    if isinstance(node.op, ast.Not):
        operand = node.operand
        node.operand = ast.copy_location(ast.UnaryOp(ast.Not(), operand), operand)
    else:
        node.op = ast.UAdd()
